"""Exports in a repository of the Hub: revisions by step, uploaded once."""

import hashlib
import shutil
from pathlib import Path

import hub_server
import huggingface_hub
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from megaenc.convert.command import main
from megaenc.convert.hub_upload import HubRepository
from megaenc.errors import InputError

pytestmark = pytest.mark.multiprocess  # the run of `two_runs`


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Serve an empty stand-in of the Hub, for which this process has a token."""
    with hub_server.serve() as server:
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "right")
        yield server


@pytest.fixture
def command(two_runs, exports):
    """Return the arguments that upload `exports`."""
    words = ["to-hf", "--load", two_runs / "run", "--output", exports[0].parent, "--all"]
    return [*map(str, words), "--push", "me/model"]


def digests(files):
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def writes(hub):
    """Return, and forget, the requests that changed a repository."""
    calls = [
        call
        for call in hub.calls
        if call.startswith("PUT") or "/commit/" in call or "/branch/" in call
    ]
    hub.calls.clear()
    return calls


def read_files(directory):
    """Return the files of an export as the Hub has them."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return files | {".gitattributes": b""}


def test_an_interrupted_upload_is_completed_by_the_same_command(
    exports, command, hub, refusal, capfd
):
    hub.fail_at = "POST /api/models/me/model/commit/step20"
    line = refusal(main, command)
    assert "--push me/model: the Hub answers 500: the stand-in fails; give the same command" in line
    assert hub.private
    assert hub.files("step20").keys() == hub.files("main").keys() == {".gitattributes"}
    sent = [call for call in writes(hub) if call.startswith("PUT")]
    assert len(sent) == len(set(sent)) == 3, "the weights of each step once"

    hub.fail_at = ""
    main(command)
    assert "/me/model: uploaded step20, main; 2 of 4 revisions" in capfd.readouterr().out
    commits = [f"POST /api/models/me/model/commit/{name}" for name in ("step20", "main")]
    assert [call for call in writes(hub) if "/branch/" not in call] == commits
    refs = huggingface_hub.HfApi().list_repo_refs("me/model").branches
    revisions = {f"step{step}": directory for step, directory in exports.items()}
    assert {ref.name for ref in refs} == {"main", "step0", "step10", "step20"}
    for revision, directory in {"main": exports[20], **revisions}.items():
        assert digests(hub.files(revision)) == digests(read_files(directory))

    main(command)
    assert "uploaded nothing; 4 of 4" in capfd.readouterr().out
    assert writes(hub) == []


def test_a_revision_loads_with_transformers(exports, command, hub):
    main(command)
    for revision, step in {"step10": 10, "main": 20}.items():
        expected = AutoModelForMaskedLM.from_pretrained(exports[step]).state_dict()
        model = AutoModelForMaskedLM.from_pretrained("me/model", revision=revision).state_dict()
        assert all(torch.equal(model[name], weight) for name, weight in expected.items())
        tokenizer = AutoTokenizer.from_pretrained("me/model", revision=revision)
        ids = AutoTokenizer.from_pretrained(exports[step])("stan plark")["input_ids"]
        assert tokenizer("stan plark")["input_ids"] == ids


def test_main_becomes_the_export_and_keeps_files_of_others(
    two_runs, exports, command, hub, refusal
):
    files = {"LICENSE": b"ours", "model-00001-of-00002.safetensors": b"", "modules.json": b"[]"}
    files |= {".gitattributes": b"", "README.md": b"old"}
    files["conversion.json"] = (exports[0] / "conversion.json").read_bytes()
    hub.private = False
    hub.commit("main", {".gitattributes": b""})
    hub.commit("main", files)
    words = ["to-hf", "--load", str(two_runs / "run"), "--output", "one", "--ckpt-step", "10"]
    main([*words, "--push", "me/model"])
    local = read_files(Path("one")) | {"LICENSE": b"ours"}
    assert digests(hub.files("main")) == digests(local)
    assert hub.branches.keys() == {"main"} and not hub.private
    hub.fail_at = "/commit/"
    refusal(main, command)
    assert hub.files("step0") == {".gitattributes": b""}, "not the weights of another step"


def test_another_model_is_left_alone(command, hub, refusal):
    hub.private = True
    for files in (
        {"config.json": b"{}"},
        {"conversion.json": b'{"identity": "0", "run": "other"}', "config.json": b"{}"},
        {"conversion.json": b"{"},
        {"adapter_model.safetensors": b""},
        {"unet/model.bin": b""},
        {"model.Q8_0.GGUF": b""},
    ):
        hub.commit("main", {})
        hub.commit("step10", files)
        line = refusal(main, command)
        found = "run " if "conversion.json" in files else next(iter(files))
        message = f"revision step10 holds another model than this run's ({found}"
        assert f"--push me/model: {message}" in line
    assert writes(hub) == []


def test_files_of_the_first_commit_stay_only_in_main(exports, command, hub, refusal):
    hub.private = True
    first = {".gitattributes": b"", "vocab.txt": b"", "docs/notes.md": b""}
    hub.commit("main", first)
    hub.fail_at = "POST /api/models/me/model/commit/step10"
    refusal(main, command)
    assert hub.files("step10") == first
    hub.fail_at = ""
    main(command)
    assert digests(hub.files("step10")) == digests(read_files(exports[10]))
    assert digests(hub.files("main")) == digests(read_files(exports[20]) | first)


def test_a_commit_of_others_during_an_upload_is_not_replaced(exports, hub):
    hub.private = True
    hub.commit("main", {".gitattributes": b""})
    repository = HubRepository("me/model", ["main", "step10"], "0")
    for revision in ("main", "step10"):
        files = {"adapter_model.safetensors": revision.encode()}
        hub.commit(revision, files)
        with pytest.raises(InputError, match="the Hub answers 412: A commit has happened since; "):
            repository.upload({revision: exports[10]})
        assert hub.files(revision) == files
    with pytest.raises(InputError, match="No such file or directory"):
        repository.upload({"main": exports[10].parent})


def test_files_that_the_hub_ignores_are_named_and_uploaded_later(
    exports, command, hub, refusal, capfd
):
    hub.ignored = ("tokenizer.json",)
    line = refusal(main, command)
    assert "revision step0 lacks tokenizer.json, expected all files of the export; remove" in line
    hub.ignored = ()
    main(command)
    assert "uploaded step0, step10, step20 and 1 more; 0 of 4" in capfd.readouterr().out
    assert digests(hub.files("step0")) == digests(read_files(exports[0]))


def test_existing_output_with_other_files_than_the_export(two_runs, hub, refusal):
    words = ["to-hf", "--load", str(two_runs / "run"), "--output", "one"]
    main(words)
    words += ["--push", "me/model"]
    weights = Path("one/model.safetensors")
    content = weights.read_bytes()
    weights.unlink()
    found = "one: exists already, found other weights than conversion.json names"
    assert found in refusal(main, words)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert found in refusal(main, words)
    weights.write_bytes(content[:-1])
    assert "one: damaged weights (" in refusal(main, words)
    assert hub.calls == []
    weights.write_bytes(content)
    expected = read_files(Path("one"))
    for name in (".cache/lock", ".DS_Store"):
        Path("one", name).parent.mkdir(exist_ok=True)
        Path("one", name).write_text("")
    main(words)
    assert digests(hub.files("main")) == digests(expected)


def test_exports_of_a_run_that_has_grown_are_incomplete(two_runs, exports, hub, refusal, tmp_path):
    directory = tmp_path / "hf"
    shutil.copytree(exports[0].parent, directory)
    shutil.rmtree(directory / exports[10].name)
    words = ["to-hf", "--load", two_runs / "run", "--output", directory, "--all"]
    line = refusal(main, [*map(str, words), "--push", "me/model"])
    assert f"{exports[10].name}: missing, expected the export of step 10 next to the others" in line
    assert hub.calls == []


def test_existing_output_of_other_options_is_refused(command, hub, refusal):
    line = refusal(main, [*command, "--as", "llama"])
    assert "exists already, found an export with family eurobert, expected llama" in line
    line = refusal(main, [*command, "--license", "mit"])
    assert "exists already, found an export with license unknown, expected mit; remove it" in line
    assert hub.calls == []


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        ("name", "--push model: expected a name such as ORG/NAME"),
        ("no token", "found no token of the Hugging Face Hub; give `hf auth login`"),
        ("bell", "found an unprintable token of the Hugging Face Hub; give `hf auth login`"),
        ("token file", "--push me/model: [Errno 21] Is a directory: "),
        ("token", "the Hub answers 401: wrong token; check the token's right to write"),
        ("namespace", "the Hub answers 403: no rights in this namespace; check"),
        ("write", "the Hub answers 403: no right to write; check the token's right to write"),
        ("network", "Connection refused; check the token's right to write, and the network"),
        ("offline", "offline mode is enabled"),
    ],
)
def test_what_forbids_an_upload_is_one_line_before_the_export(
    problem, text, two_runs, hub, refusal, monkeypatch, tmp_path
):
    constants = huggingface_hub.constants
    if problem in ("no token", "token file"):
        monkeypatch.delenv("HF_TOKEN")
        path = tmp_path / "token" if problem == "no token" else tmp_path
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(path))
    elif problem == "bell":
        monkeypatch.setenv("HF_TOKEN", "secret\a")
    elif problem == "token":
        monkeypatch.setenv("HF_TOKEN", "wrong")
    elif problem in ("namespace", "write"):
        hub.writable = False
        hub.private = None if problem == "namespace" else True
        hub.commit("main", {})
    elif problem == "network":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif problem == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = "model" if problem == "name" else "me/model"
    flags = ["to-hf", "--load", two_runs / "run", "--output", "new", "--push", name]
    line = refusal(main, flags)
    assert text in line and "secret" not in line
    assert not Path("new").exists() and writes(hub) == []
