"""Zero-shot retrieval scores of a study, from the files of `megaenc embed eval`.

STUDY/embed/NAME/pretrained.json has a model's scores as pretrained, and those of BM25 and of a
random ranking; seed-S.json those after contrastive training with seed S.
"""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megaenc.embed.evaluation_file import Place, QueryScores, read_evaluation
from megaenc.finetune.results.aggregate import IntervalKind, compute_interval
from megaenc.study.manifest.model_key import ModelKey
from megaenc.study.manifest.scope import EMPTY_SCOPE, StudyScope
from megaenc.study.results.evidence import Evidence, Score
from megaenc.study.results.groups import ZERO_SHOT
from megaenc.study.results.pretrain_runs import resolve_model_keys
from megaenc.study.run.embed_stage import PRETRAINED

METRIC = "ndcg@10"
RECALL = "recall@100"
BASELINES = ("BM25", "random")
_SEED_FILE = re.compile(r"seed-(\d{1,9})")


@dataclass(frozen=True)
class ZeroShotResults:
    """Zero-shot retrieval scores of a study's models, of BM25 and of a random ranking.

    `read_zero_shot` builds it. A Place is (model, data set, measure), with the measures "ndcg@10"
    and "recall@100". `pretrained` has the QueryScores (a fraction for each query) of each Place
    without contrastive training, `trained` those after it by Place, then by seed, and `baselines`
    those of "BM25" and "random" in place of a model. `model_keys` are by name, for models that have
    one. `seeds` are those of contrastive training that a complete model has: the manifest's, else
    all that occur. `scope` is what the manifest plans.
    """

    pretrained: Mapping[Place, QueryScores]
    """scores by (model, data set, measure), without contrastive training"""
    trained: Mapping[Place, Mapping[int, QueryScores]]
    """scores by (model, data set, measure), then by seed of contrastive training"""
    baselines: Mapping[Place, QueryScores]
    """scores by (name in BASELINES, data set, measure)"""
    model_keys: Mapping[str, ModelKey]
    """key of each model that has one, by name"""
    seeds: tuple[int, ...]
    """seeds of contrastive training that a complete model has: the manifest's, else all with a
    score; empty without either"""
    scope: StudyScope = EMPTY_SCOPE

    @property
    def models(self) -> list[str]:
        """Return the names of the models with any score, in order of appearance."""
        return list(dict.fromkeys(model for model, *_ in (*self.pretrained, *self.trained)))

    @property
    def datasets(self) -> list[str]:
        """Return the names of the data sets with any score, in the manifest's order.

        Without a manifest they are in order of appearance.
        """
        named = dict.fromkeys(dataset for _, dataset, _ in (*self.pretrained, *self.trained))
        return [name for name in self.scope.retrieval_sets if name in named] or list(named)

    @property
    def is_trained(self) -> bool:
        """Return whether any model has scores after contrastive training."""
        return bool(self.trained)

    def build_evidence(self, kind: IntervalKind = "normal") -> Evidence:
        """Return the NDCG@10 of all models as the family ZS, for the tests of claims.

        Scores are those after contrastive training if any model has them, else those as pretrained,
        as the one seed 0; there are no averages. Models have no score on data sets where one of
        `seeds` is missing. Scores of queries are left out on a data set unless all models have the
        same queries and data there.

        Args:
            kind: 95 % interval over seeds, 1.96 standard errors ("normal") or Student's ("t").
        """
        if self.is_trained:
            by_place = self.trained
            needed = set(self.seeds)
        else:
            by_place = {place: {0: query_scores} for place, query_scores in self.pretrained.items()}
            needed = {0}
        members = {
            place: scores
            for place, scores in by_place.items()
            if place[2] == METRIC and scores.keys() >= needed
        }
        scores = []
        for (model, dataset, _), by_seed in members.items():
            by_seed = {seed: by_seed[seed] for seed in sorted(needed)}
            dataset_scores = [
                query_scores
                for place, scores_by_seed in members.items()
                if place[1] == dataset
                for query_scores in scores_by_seed.values()
            ]
            is_paired = (
                len(
                    {
                        (query_scores.fingerprint, query_scores.query_ids)
                        for query_scores in dataset_scores
                    }
                )
                == 1
            )
            blocks = (
                {seed: query_scores.values for seed, query_scores in by_seed.items()}
                if is_paired
                else {}
            )
            means = {seed: query_scores.mean for seed, query_scores in by_seed.items()}
            interval = compute_interval(list(means.values()), kind)
            half = None if math.isnan(interval.half) else interval.half
            key = self.model_keys.get(model)
            load = functools.partial(dict, blocks)
            scores.append(
                Score(
                    model, key, ZERO_SHOT, dataset, interval.mean, half, means, load_examples=load
                )
            )
        return Evidence(scores, METRIC, kind, self.scope)

    def describe_missing(self) -> str:
        """Return a sentence that names the models with missing scores; "" without any.

        Models, data sets and seeds are those that the manifest plans; there are none without it.
        The counts are of NDCG@10, for which a data set counts once as pretrained and once for each
        seed.
        """
        incomplete = []
        for model in self.scope.model_keys:
            planned = [(model, dataset, METRIC) for dataset in self.scope.retrieval_sets]
            evaluations = [sum(place in self.pretrained for place in planned)]
            evaluations += [
                sum(seed in self.trained.get(place, {}) for place in planned) for seed in self.seeds
            ]
            finished = sum(evaluations)
            total = len(planned) * len(evaluations)
            if finished < total:
                incomplete.append(f"{model} ({finished} of {total})")
        if not incomplete:
            return ""
        return f"Zero-shot scores are missing, of models (scores so far): {', '.join(incomplete)}."


def read_zero_shot(directory: Path, scope: StudyScope = EMPTY_SCOPE) -> ZeroShotResults | None:
    """Read the evaluations of the models, data sets and seeds in `scope`.

    Without a manifest (no model in `scope`), all evaluations count. Unreadable files count as
    missing. Baselines are in the same files. The result is None without any scores of models, as
    without the directory, and if the manifest plans no retrieval sets.

    Args:
        directory: STUDY/embed, with the files NAME/pretrained.json and NAME/seed-S.json.
        scope: What the manifest plans; empty without one.
    """
    if scope.model_keys and not scope.retrieval_sets:
        return None
    pretrained: dict[Place, QueryScores] = {}
    trained: dict[Place, dict[int, QueryScores]] = {}
    baselines: dict[Place, QueryScores] = {}
    for file in sorted(directory.glob("*/*.json")):
        model = file.parent.name
        seed = _SEED_FILE.fullmatch(file.stem)
        is_planned = not scope.model_keys or (
            model in scope.model_keys and (seed is None or int(seed[1]) in scope.contrastive_seeds)
        )
        if not is_planned or (seed is None and file.stem != PRETRAINED):
            continue
        evaluation = read_evaluation(file)
        if evaluation is None:
            continue
        for (scored, dataset, metric), scores in evaluation.scores.items():
            if scope.retrieval_sets and dataset not in scope.retrieval_sets:
                continue
            if scored in BASELINES:
                baselines.setdefault((scored, dataset, metric), scores)
            elif scored == file.stem and seed is None:
                pretrained[model, dataset, metric] = scores
            elif scored == file.stem:
                trained.setdefault((model, dataset, metric), {})[int(seed[1])] = scores
    if not pretrained and not trained:
        return None
    seeds = scope.contrastive_seeds or tuple(
        sorted({seed for by_seed in trained.values() for seed in by_seed})
    )
    names = sorted({model for model, *_ in (*pretrained, *trained)})
    return ZeroShotResults(
        pretrained, trained, baselines, resolve_model_keys(names, scope.model_keys), seeds, scope
    )
