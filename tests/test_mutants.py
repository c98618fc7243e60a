"""The mutants match the source; ``python tools/mutants.py`` runs them."""

from pathlib import Path

from tools.mutants import read_mutants

ROOT = Path(__file__).parents[1]


def test_each_mutant_replaces_one_piece_of_text_and_names_tests_that_exist():
    mutants = read_mutants()
    assert len(mutants) >= 80
    assert [mutant.name for mutant in mutants if not mutant.is_applicable] == []
    assert [mutant.name for mutant in mutants if mutant.before == mutant.after] == []
    paths = {word for mutant in mutants for word in mutant.tests if word.startswith("tests/")}
    assert [path for path in sorted(paths) if not (ROOT / path.split("::")[0]).exists()] == []
