"""The act that `make run` plays, with fewer and smaller steps."""

from plait.demo import run


def test_the_workload_trains_and_is_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("STEPS", "TRIAL_STEPS", "BEHIND_STEPS"):
        monkeypatch.setattr(run, name, 2)
    made = run._gpt
    monkeypatch.setattr(run, "_gpt", lambda name, **sizes: made(name, **{**sizes, "width": 32, "layers": 1}))
    run.act(tmp_path)
    told = capsys.readouterr().out
    assert "best of 4 trials: swept-" in told
    assert "times as fast" in told
    assert (tmp_path / "run" / "report.html").is_file()
