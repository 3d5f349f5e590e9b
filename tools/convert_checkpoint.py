"""Checkpoints to Hugging Face folders: python tools/convert_checkpoint.py to-hf --load runs/a --output hf/a"""

if __name__ == "__main__":
    from megaenc.convert.command import main

    main(prog="convert_checkpoint.py")
