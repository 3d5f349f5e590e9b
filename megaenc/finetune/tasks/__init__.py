"""The four families of tasks; what they share is in base.py."""

from megaenc.finetune.examples import Family
from megaenc.finetune.tasks.base import Model, NotFinite, Scores, Task
from megaenc.finetune.tasks.classification import Classification
from megaenc.finetune.tasks.question_answering import Answering
from megaenc.finetune.tasks.retrieval import Retrieval
from megaenc.finetune.tasks.token_classification import Tagging

TASKS: dict[Family, type[Task]] = {task.family: task for task in (Classification, Tagging, Answering, Retrieval)}

__all__ = ["TASKS", "Model", "NotFinite", "Scores", "Task"]
