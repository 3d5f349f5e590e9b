"""Convert checkpoints to and from Hugging Face directories, and merge them.

The same as `megaenc convert`.

python tools/convert_checkpoint.py to-hf --load runs/a --output hf/a
python tools/convert_checkpoint.py from-hf --input hf/llama --output core/llama
python tools/convert_checkpoint.py merge --load runs/a@1000,1200 runs/b --output runs/merged
"""

if __name__ == "__main__":
    from megaenc.convert.command import main

    main(prog="convert_checkpoint.py")
