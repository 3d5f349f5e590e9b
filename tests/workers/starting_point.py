"""What a run starts from, as each rank sees it: `starting_point.py FOLDER FLAGS...` writes checkpoint 0 and the batches."""

import sys
from pathlib import Path

import numpy as np
import torch


def main(folder: Path, flags: list[str]) -> None:
    from megaenc import backend
    from megaenc.dist_env import get_rank
    from megaenc.training.config import parse_config
    from megaenc.training.planning import build_plan

    plan = build_plan(parse_config([*flags, "--save", str(folder)], "starting_point.py"))
    layout = plan.settings.layout
    device = backend.init_distributed(layout, plan.settings.seed, layout.chunks_per_stage(plan.settings.shape.num_layers))
    from megaenc.training.checkpoint.manager import CheckpointManager
    from megaenc.training.engine import Engine
    from megaenc.training.micro_batches import build_micro_batch
    from megaenc.training.run_dir import RunDir

    engine = Engine(plan, device)
    if get_rank() == 0:
        RunDir(folder, plan).begin(plan, engine.kernel_metadata, step=-1)
    torch.distributed.barrier()  # it takes no folder that holds something else
    for step in (1, plan.settings.train_iters):  # one of each phase
        objective = plan.schedule.objectives(step)[0][1]
        for samples in engine.sampler.samples(plan.first_sample(step)):
            batch = build_micro_batch(plan.packs, samples, objective, plan.settings.seed, device.device)
            np.savez(
                folder / f"batch_{samples.start}_rank{get_rank()}.npz",
                **{name: getattr(batch, name).numpy() for name in ("tokens", "positions", "predict_at", "labels")},
            )
    CheckpointManager(folder / "checkpoints").save(engine, 0, {})
    backend.destroy_distributed()


if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    main(Path(sys.argv[1]), sys.argv[2:])
