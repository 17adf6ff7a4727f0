"""`omnirl-hpc report`, and the end of a run; tests/report looks at the page."""

from __future__ import annotations

import pytest

from omnirl_hpc.cli.main import main
from tests.cli.run_states import make_state
from tests.cli.test_commands import omnirl


def test_the_page_is_written_where_it_is_said(finished_run, tmp_path, capsys):
    run = make_state("torn", finished_run, tmp_path)
    for arguments, file in (
        ((), run / "report.html"),
        (("--out", str(tmp_path / "r.html")), tmp_path / "r.html"),
    ):
        main(["report", str(run), *arguments])
        assert capsys.readouterr().out == f"report: {file}\n"
        assert file.read_text().startswith("<!DOCTYPE html>")
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_locale_without_these_letters(finished_run, tmp_path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = omnirl("report", finished_run, "--out", tmp_path / "r.html", **locale)
    assert ended.returncode == 0, ended.stderr
    assert " · finished · " in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("state", "out", "said"),
    [
        ("empty", "r.html", "is not the folder of a run: it has no config.yaml"),
        ("missing", "r.html", "does not exist"),
        ("finished", "nowhere/r.html", "the report cannot be written: [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_is_one_sentence(finished_run, tmp_path, capsys, state, out, said):
    with pytest.raises(SystemExit) as ended:
        main(["report", str(make_state(state, finished_run, tmp_path)), "--out", str(tmp_path / out)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("omnirl-hpc report: ") and said in line


def test_a_run_ends_with_its_report_and_its_reward(finished_run):
    done, report, reward = (finished_run / "output.txt").read_text().splitlines()[-3:]
    assert done == f"done: results are in {finished_run}"
    assert (
        report == f"report: {finished_run / 'report.html'}"
        and "· finished ·" in (finished_run / "report.html").read_text()
    )
    assert reward.startswith("mean reward -0.00") and reward.endswith(" in the last")
