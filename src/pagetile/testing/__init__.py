"""Random cases, poisoned inputs, float64 oracle and tolerances, for the tests of any kernel.

A kernel with the contract of ``paged_attention`` is tested in five lines:

    for seed in range(1000):
        inputs = make_inputs(random_case(random.Random(seed)))
        result = my_kernel(inputs.q, inputs.k_cache, inputs.v_cache, inputs.batch, **inputs.options)
        assert_matches(result, inputs)
"""

from .paged_cases import TABLE_POISON, PagedCase, PagedInputs, make_inputs
from .paged_oracle import Comparison, Tolerance, assert_matches, compare, oracle, tolerance
from .poison import poisoned_memory
from .random_cases import random_case, vary

__all__ = [
    "TABLE_POISON",
    "Comparison",
    "PagedCase",
    "PagedInputs",
    "Tolerance",
    "assert_matches",
    "compare",
    "make_inputs",
    "oracle",
    "poisoned_memory",
    "random_case",
    "tolerance",
    "vary",
]
