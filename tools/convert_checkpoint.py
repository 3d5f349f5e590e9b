"""Convert checkpoints to and from Hugging Face folders; the same as `megaenc convert`.

python tools/convert_checkpoint.py to-hf --load runs/a --output hf/a
python tools/convert_checkpoint.py from-hf --input hf/llama --output core/llama
"""

if __name__ == "__main__":
    from megaenc.convert.command import main

    main(prog="convert_checkpoint.py")
