"""`python -m flashproof.tests.training FILE IMPLEMENTATION`: judges an implementation on tensors of a training again.

FILE holds query, key, value and output gradient, as the check training/activations keeps them. The exit status is 1 if
a tensor is outside its bound or leans.
"""

import argparse
import sys
from pathlib import Path

import torch

# Without a GPU, this module selects Triton's interpreter. It must do so before Triton is imported.
import flashproof.impls.triton  # noqa: F401
from flashproof import judge
from flashproof.impls.spec import DTYPES
from flashproof.loading import load
from flashproof.tests.training.kernels import of_implementation


def main(arguments: list[str] | None = None) -> int:
    """Prints the verdicts in each dtype that the implementation claims. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m flashproof.tests.training")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("implementation", metavar="IMPLEMENTATION")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="only this dtype; repeatable")
    options = parser.parse_args(arguments)
    implementation = load(options.implementation)
    tensors = torch.load(options.file, weights_only=True)
    passed = True
    for dtype in options.dtype or implementation.supports.dtypes:
        query, key, value, dout = (tensor.to(getattr(torch, dtype)) for tensor in tensors)
        out, backward = of_implementation(implementation, query.dtype)(query, key, value)
        dq, dk, dv = backward(dout)
        of_call = {"is_causal": True, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        verdicts = judge(out, query, key, value, **of_call, arithmetic=implementation.arithmetic)
        print(f"{dtype}\n{verdicts}\n")
        passed &= verdicts.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
