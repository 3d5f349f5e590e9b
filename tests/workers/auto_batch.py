"""The pretraining command, with memory for 9 packs on rank 0 and for 5 on others."""

import sys

from megaenc.backend import prepare_megatron
from megaenc.console import silence_libraries
from megaenc.dist_env import get_rank

if __name__ == "__main__":
    silence_libraries()
    prepare_megatron()
    from megaenc.training import planning
    from megaenc.training.command import main
    from megaenc.training.distributed import largest_batch

    def measure_peak(engine, objective, samples, packs):
        """Run the micro-batch, of which each pack takes 100 bytes."""
        with engine.no_grad_reduction():
            engine.local_loss_and_grad_norm(samples, objective, packs)
        return 100.0 * len(samples)

    largest_batch.measure_peak = measure_peak
    largest_batch.measure_room = lambda: 500.0 if get_rank() else 900.0
    largest_batch._STATE_BYTES = 0
    planning.check_device = lambda settings, backend: None
    main(sys.argv[1:])
