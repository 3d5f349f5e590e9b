r"""Pretrain an encoder in one process or under torchrun, as `megaenc pretrain`.

torchrun --nproc-per-node 2 examples/pretrain_encoder.py \
    --objective-schedule clm:0.25,mlm:0.75 --tensor-model-parallel-size 2
"""

if __name__ == "__main__":  # checkpoint writers are spawned and import this file again
    from megaenc.training.command import main

    main(prog="pretrain_encoder.py")
