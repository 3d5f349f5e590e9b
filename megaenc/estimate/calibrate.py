"""Rates of this machine for this model: `measure` in as many processes as the run has here, and what follows from it."""

import dataclasses
import tempfile
from statistics import mean

from megaenc.backend.layout import Layout
from megaenc.console import say
from megaenc.errors import InputError
from megaenc.estimate.case import Case
from megaenc.estimate.documents import Documents
from megaenc.estimate.machines import Link, Rates, messages
from megaenc.estimate.memory import kept_bytes, stage_memory
from megaenc.estimate.time import ends_bytes_moved, layer_bytes_moved, update_bytes_moved
from megaenc.estimate.whole import Demand
from megaenc.model.config import padded_vocab_size
from megaenc.processes import Workers, usable_cores
from megaenc.training.settings import PretrainSettings

_LEAST = 0.05  # of what was measured beside it, where times that vary leave nothing for a part of a step


def calibrate(
    settings: PretrainSettings, case: Case, demand: Demand, docs: Documents, known: Rates | None, seconds: float = 4.0
) -> Rates:
    """Measure, `seconds` for each thing, a minute in all.

    `known`: the machine of --gpu, whose links between nodes count where the run has more than one.

    Each process has one rank's share of a layer and of the vocabulary, and all compute at once, as they will in the run.
    """
    import psutil
    import torch  # here alone: estimates from the table need none of it

    from megaenc.backend.device import detect
    from megaenc.estimate.measure import Job, measure

    host = detect().is_host
    devices = min(case.gpus, usable_cores() if host else torch.cuda.device_count())
    if devices == 1 < case.gpus and known is None:
        raise InputError(
            f"--calibrate: found one device here, which cannot say how {case.gpus} are connected; "
            "give --gpu too, for the table's links"
        )
    share = share_of(settings, case)
    objectives = tuple(dict.fromkeys(work.objective for work in demand.works))
    say(f"measuring this machine, {devices} process{'es' if devices > 1 else ''} at once (about a minute)")
    with tempfile.TemporaryDirectory() as folder, Workers(measure, devices) as workers:
        jobs = [Job(rank, devices, folder, share, objectives, docs.lengths, seconds) for rank in range(devices)]
        each = list(workers.map(jobs))
    found = {name: mean(one[name] for one in each) for name in each[0]}
    memory = psutil.virtual_memory().total / devices if host else torch.cuda.get_device_properties(0).total_memory
    source = f"{'cpu' if host else torch.cuda.get_device_name()}, {devices} at once, measured here"
    return rates_from(found, share, demand, host, devices, memory, known, source)


def share_of(settings: PretrainSettings, case: Case) -> PretrainSettings:
    """Return one rank's share of every layer and of the vocabulary, as a run of one process."""
    shape, tensor = settings.shape, case.tensor
    rows = padded_vocab_size(case.vocab_size, shape.make_vocab_size_divisible_by, tensor) // tensor
    part = dataclasses.replace(
        shape,
        num_attention_heads=shape.num_attention_heads // tensor,
        num_query_groups=shape.num_query_groups // tensor,
        ffn_hidden_size=shape.ffn_hidden_size // tensor,
        kv_channels=shape.head_dim,
        vocab_size=rows,
    )
    return dataclasses.replace(
        settings,
        shape=part,
        layout=Layout(),
        global_batch_size=2 * settings.micro_batch_size,
        rampup_batch_size=None,
        train_iters=10_000,
        train_tokens=None,
    )


def rates_from(
    found: dict[str, float],
    share: PretrainSettings,
    demand: Demand,
    host: bool,
    devices: int,
    memory: float,
    known: Rates | None,
    source: str,
) -> Rates:
    """Return rates such that the formulas give what was measured, for the model of one layer and for each layer more.

    The difference between the two depths is a layer; without its products and attention it is everything else. What one layer
    does not explain is embedding, head and loss; what is neither is the update. Memory beyond the formulas' is the allocator's.
    """
    from megaenc.estimate.measure import DEPTHS, MICRO_BATCHES

    few, many = DEPTHS
    one, deep = (
        Case.of(dataclasses.replace(share, shape=dataclasses.replace(share.shape, num_layers=depth)), share.shape.vocab_size, 1)
        for depth in DEPTHS
    )
    work = dataclasses.replace(demand.works[0], predicted=found["predicted"] / share.micro_batch_size)
    packs, stage = one.micro_batch_size, one.stage(0)
    gemm = packs * work.body_flops(one.shape) / found["products"]
    attention = found.get("attention") or found["causal attention"]
    causal = found.get("causal attention") or found["attention"]
    core = packs * work.attention_flops(one.shape) / (causal if work.causal else attention)
    shallow, whole = (found[f"forward and backward {depth}"] for depth in DEPTHS)
    rest = max((whole - shallow) / (many - few) - found["products"] - core, _LEAST * found["products"])
    head = packs * work.head_flops(one.shape, one.rows) / gemm
    ends = max(shallow - found["products"] - core - rest - head, _LEAST * head)
    update = max(found[f"whole {many}"] - MICRO_BATCHES * (whole + found[f"data {many}"]), 1e-6)
    if devices > 1:
        passed = 2 * (devices - 1) / devices * found["bytes activations"]
        bandwidth = passed / max(found["reduce activations"] - found["reduce small"], 1e-6)
        inside = Link(bandwidth, found["reduce small"] / (2 * messages(devices)))
    else:
        inside = known.inside if known else Link(float("inf"), 0.0)
    plain = Rates(
        peak=found["peak"],
        gemm=gemm,
        attention=attention,
        causal_attention=causal,
        elementwise=layer_bytes_moved(one) / rest,
        loss=ends_bytes_moved(one, work, stage) / ends,
        optimizer=update_bytes_moved(deep, deep.stage(0)) / update,
        layer_floor=0.0,
        start=found[f"data {few}"],
        inside=inside,
        between=known.between if known else inside,
        devices=devices if known is None or host else known.devices,
        memory=memory,
        base=found["base"],
        host=host,
        source=source,
    )
    context = 0.0 if host else found["base"]  # which the device's allocator does not count
    lost = [
        max(0.0, found[f"taken {depth}"] + context - stage_memory(each, work, each.stage(0), plain).total)
        for depth, each in ((few, one), (many, deep))
    ]
    kept = kept_bytes(one, stage, host)[0]
    growing = min(max(0.0, (lost[1] - lost[0]) / ((many - few) * kept)), 1.0)
    return dataclasses.replace(plain, pieces=max(0.0, lost[1] - growing * many * kept), pieces_of_kept=growing)
