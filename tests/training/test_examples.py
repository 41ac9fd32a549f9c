"""Examples in the docstrings of the public functions run on one rank."""

from __future__ import annotations

from typing import Any

from tests.support.ranks import Pools


def _failures(comm: Any) -> dict[str, str]:
    """Run the examples of all public names and of ``rank_slice``; return the reports of those that fail."""
    import doctest
    import io

    from matex_data import training
    from matex_data.training.exact import rows

    finder, reports = doctest.DocTestFinder(recurse=False), {}
    examples = {name: getattr(training, name) for name in training.__all__ if name != "World"}
    for name, value in {**examples, "rank_slice": rows.rank_slice}.items():
        tests = finder.find(value, name, globs={"rank_slice": rows.rank_slice})
        assert any(test.examples for test in tests), f"{name} has no example"
        report = io.StringIO()
        runner = doctest.DocTestRunner(verbose=False)
        for test in tests:
            runner.run(test, out=report.write)
        if runner.failures:
            reports[name] = report.getvalue()
    return reports


def test_examples_run(ranks: Pools) -> None:
    assert ranks(1).run(_failures, timeout=120) == [{}]
