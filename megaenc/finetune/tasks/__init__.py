"""The task families, by name in `TASKS`."""

from megaenc.finetune.examples import TaskFamily
from megaenc.finetune.tasks.base import FinetuneTask, NonFinitePredictionError, Scores, TaskModel
from megaenc.finetune.tasks.classification import Classification
from megaenc.finetune.tasks.multi_label import MultiLabel
from megaenc.finetune.tasks.question_answering import QuestionAnswering
from megaenc.finetune.tasks.regression import Regression
from megaenc.finetune.tasks.reranking import Reranking
from megaenc.finetune.tasks.retrieval import RetrievalTask
from megaenc.finetune.tasks.token_classification import TokenClassification

TASKS: dict[TaskFamily, type[FinetuneTask]] = {
    task.family: task
    for task in (
        Classification,
        TokenClassification,
        QuestionAnswering,
        RetrievalTask,
        Regression,
        MultiLabel,
        Reranking,
    )
}

__all__ = ["TASKS", "FinetuneTask", "NonFinitePredictionError", "Scores", "TaskModel"]
