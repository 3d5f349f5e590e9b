"""Entry point of benchmarks/gpu.sh, which checks for missing packages first."""

import importlib.util
import sys

NEEDED = {
    "torch": "torch (2.11 or later, of the accelerator's own index)",
    "numpy": "numpy",
    "psutil": "psutil",
    "yaml": "PyYAML",
    "tyro": "tyro",
    "docstring_parser": "docstring-parser",
    "typeguard": "typeguard",
    "rich": "rich",
    "packaging": "packaging",
    "megatron": "megatron-core==0.16.1",
}

if __name__ == "__main__":
    missing = [package for module, package in NEEDED.items() if not importlib.util.find_spec(module)]
    if missing:
        print(f"error: not installed: {', '.join(missing)}; see benchmarks/gpu.sh --help", file=sys.stderr)
        sys.exit(2)
    from megaenc.bench.gpu.command import main

    main()
