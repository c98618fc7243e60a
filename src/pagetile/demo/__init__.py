"""The checkpoint that ships with pagetile: a Llama of 4.6 M parameters that continues Python code.

It is an ordinary Hugging Face folder, made by `tools/train_demo.py` from Python's standard library,
so that an engine can run a real model without a download. `README.md` beside this file is its model
card.
"""

from pathlib import Path


def path() -> Path:
    """Directory of the shipped checkpoint.

    >>> (path() / "model.safetensors").is_file()
    True
    """
    return Path(__file__).parent
