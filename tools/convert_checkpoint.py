"""Checkpoints to Hugging Face folders and back.

python tools/convert_checkpoint.py to-hf --load runs/a --output hf/a
python tools/convert_checkpoint.py from-hf --input hf/llama --output core/llama
"""

if __name__ == "__main__":
    from megaenc.convert.command import main

    main(prog="convert_checkpoint.py")
