"""The interpreter of Dockerfiles, on steps that need no root."""

from pathlib import Path

import dockerfile_language as language
import pytest
import run_in_chroot as interpreter


def test_instructions_and_lines():
    text = "# a\nARG A=1\nRUN one \\\n # between\n && two\n\ncopy a b\n"
    assert list(language.instructions(text)) == [(2, "ARG", "A=1"), (3, "RUN", "one && two"), (7, "COPY", "a b")]


def test_the_last_line_of_dockerignore_that_matches_decides(tmp_path):
    (tmp_path / ".dockerignore").write_text("# c\n*\n!kept\n!deep/inside.txt\n**/cache\n*.log\n")
    rules = language.ignore_rules(tmp_path)
    assert [path for path in ("kept/a", "other", "deep/inside.txt", "deep/b", "kept/cache/x", "kept/a.log", "a.log", "cache")
            if language.travels(path, rules)] == ["kept/a", "deep/inside.txt", "kept/a.log"]  # fmt: skip


def built(tmp_path, text: str, target: str | None = None, **arguments: str):
    (tmp_path / "Dockerfile").write_text(text)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/of-the-base").touch()
    place = (tmp_path / "Dockerfile", tmp_path / "context", tmp_path / "base", tmp_path / "root")
    return interpreter.build(*place, arguments, target)


def files_of(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_steps_without_commands(tmp_path):
    (tmp_path / "context/package").mkdir(parents=True)
    (tmp_path / "context/package/a.py").write_text("a")
    (tmp_path / "context/read.me").write_text("r")
    text = """
        ARG BASE=x:1
        FROM ${BASE}
        ARG FOLDER=src
        WORKDIR /opt/$FOLDER
        COPY read.me package/a.py ./
        COPY . .
        ENV PATH=/venv/bin:$PATH NOTE="two words"
        USER 7
        ENTRYPOINT ["sh"]
        CMD ["-c", "true"]
    """
    image = built(tmp_path, text, FOLDER="lib")
    assert files_of(tmp_path / "root") == ["of-the-base", "opt/lib/a.py", "opt/lib/package/a.py", "opt/lib/read.me"]
    assert files_of(tmp_path / "base") == ["of-the-base"]
    assert image.env["PATH"].startswith("/venv/bin:/usr/") and image.env["NOTE"] == "two words"
    assert (image.folder, image.user, image.entrypoint, image.command) == ("/opt/lib", "7", ["sh"], ["-c", "true"])
    assert interpreter.ids(tmp_path / "root", image.user) == "7:0"


STAGES = """
    ARG BASE=x:1
    ARG OTHER=${BASE}
    FROM ${OTHER} AS Build
    ARG OTHER
    WORKDIR /opt
    COPY made ./
    FROM build AS never
    COPY no-such-file ./
    FROM ${BASE}
    LABEL title="a thing" other=${OTHER}
    COPY --from=build /opt /srv/opt
    HEALTHCHECK --interval=1h CMD ["well"]
"""


def test_mount_points_go_again_but_for_folders_that_a_command_has_filled(tmp_path):
    (tmp_path / "pip.conf").touch()
    made = interpreter.mount_points(tmp_path / "root", [(str(tmp_path / "pip.conf"), f"/etc/{name}/lent") for name in "ab"])
    assert files_of(tmp_path / "root") == ["etc/a/lent", "etc/b/lent"]
    (tmp_path / "root/etc/b/own").touch()
    interpreter.take_away(made)
    assert files_of(tmp_path / "root") == ["etc/b/own"] and not (tmp_path / "root/etc/a").exists()


def test_stages(tmp_path, capfd):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/made").write_text("m")
    image = built(tmp_path, STAGES, OTHER="y:2")
    assert files_of(tmp_path / "root") == ["of-the-base", "srv/opt/made"]
    assert (image.labels, image.health, image.folder) == ({"title": "a thing", "other": ""}, ["well"], "/")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Dockerfile", "base", "context", "root"]
    said = capfd.readouterr().out
    assert "build, from y:2" in said and "2, from x:1" in said and "never" not in said


def test_a_stage_by_its_name(tmp_path):
    (tmp_path / "context").mkdir()
    (tmp_path / "context/made").write_text("m")
    assert built(tmp_path, STAGES, target="build").folder == "/opt"
    assert files_of(tmp_path / "root") == ["of-the-base", "opt/made"]


def test_a_root_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "root").mkdir()
    with pytest.raises(language.Refusal, match="root exists; remove it or name another --root"):
        built(tmp_path, "FROM x")


def test_a_stage_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(language.Refusal, match=r"--target later: .* has the stages build, 1"):
        built(tmp_path, "FROM x AS build\nFROM y", target="later")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("LABEL a=b", ":1: LABEL before the first FROM"),
        ("FROM x AS", ":1: only FROM IMAGE [AS NAME] is known"),
        ("FROM x\nVOLUME /a", ":2: VOLUME is not known here"),
        ("FROM x\nHEALTHCHECK NONE", ":2: only HEALTHCHECK ... CMD as a list is known"),
        ("FROM x\nCOPY a b", ":2: COPY a: no such file among those that .dockerignore lets travel"),
        ("FROM x\nCOPY --from=y a b", ":2: only COPY --from=STAGE SOURCE DESTINATION is known"),
        ("FROM x\nCOPY --chown=1 a b", ":2: only COPY [--from=STAGE] SOURCE ... DESTINATION is known"),
        ('FROM x\nRUN ["a"]', ":2: only RUN with a command for the shell is known"),
        ("FROM x\nCMD megaenc", ":2: only CMD as a list is known"),
    ],
)
def test_what_the_interpreter_does_not_know_is_refused_with_its_line(tmp_path, text, expected):
    with pytest.raises(language.Refusal) as refused:
        built(tmp_path, text)
    assert str(refused.value) == f"{tmp_path}/Dockerfile{expected}"


def test_a_build_argument_that_is_unknown_is_refused(tmp_path):
    with pytest.raises(language.Refusal, match=r"--build-arg X: .* has no such argument"):
        built(tmp_path, "ARG Y=1\nFROM x", X="2")
