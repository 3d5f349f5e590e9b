"""Upload of exports to a repository of models on the Hugging Face Hub."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaenc.console import ProgressLine, format_paths, print_rank_0
from megaenc.errors import InputError, format_error
from megaenc.json_files import parse_json, read_json_or_empty, read_regular_file

CERTIFICATE = "conversion.json"
MAIN = "main"
_GIT_ATTRIBUTES = ".gitattributes"  # of the Hub, which tells it where large files are
# Files of models, of any library.
_MODEL_SUFFIXES = (".json", ".safetensors", ".bin", ".gguf", ".pt", ".onnx")


@dataclass(frozen=True)
class _Revision:
    """State of a revision, which an upload replaces."""

    is_new: bool  # no branch yet, or one that no upload has filled
    head: str
    """Its commit; if it is new, the first one of the repository."""
    names: list[str]
    """Names of the files in that commit."""
    certificate: bytes
    """Certificate of the export in it; empty if there is none."""


class HubRepository:
    """Repository of models on the Hugging Face Hub that this user may write to.

    The constructor takes the name, such as ORG/NAME, the revisions that will be uploaded, and the
    `identity_digest` of the run, of which each revision holds one export. It creates a missing
    repository, as a private one, and raises InputError if a revision holds another model, or
    without token, network or right to write.
    """

    def __init__(self, name: str, revisions: Sequence[str], identity: str) -> None:
        """Check token, repository and existing revisions, before any long work.

        A missing repository is created, and is private.

        Args:
            name: Name of the repository, such as ORG/NAME.
            revisions: Revisions that will be uploaded.
            identity: `identity_digest` of the run.

        Raises:
            InputError: There is no token, network or right to write, or a revision holds another
                model.
        """
        from huggingface_hub import HfApi, get_token

        self.name = name
        if name.count("/") != 1:
            raise InputError(f"--push {name}: expected a name such as ORG/NAME")
        self._api = HfApi(token=True)  # each request reads the token, which may be renewed
        self._revisions: dict[str, _Revision] = {}
        with self._convert_errors("check the token's right to write, and the network"):
            token = get_token()
            problem = "no token"
            if token is not None:
                # An error of the HTTP library would quote it.
                problem = "" if token.isascii() and token.isprintable() else "an unprintable token"
            if problem:
                raise InputError(
                    f"--push {name}: found {problem} of the Hugging Face Hub; "
                    "give `hf auth login`, or set HF_TOKEN"
                )
            self._api.create_repo(name, private=True, exist_ok=True)
            self._api.auth_check(name, write=True)
            refs = self._api.list_repo_refs(name)
            heads = {branch.name: branch.target_commit for branch in refs.branches}
            first_commit = self._api.list_repo_commits(name)[-1].commit_id
            first_names = self._api.list_repo_files(name, revision=first_commit)
            for revision in revisions:
                head = heads.get(revision, first_commit)
                if head == first_commit and revision != MAIN:
                    self._revisions[revision] = _Revision(True, head, first_names, b"")
                else:
                    names = self._api.list_repo_files(name, revision=head)
                    certificate = self._read_certificate(revision, head, names, identity)
                    self._revisions[revision] = _Revision(False, head, names, certificate)

    def upload(self, exports: Mapping[str, Path]) -> None:
        """Upload exports that the Hub lacks, in order, and print which they were.

        Each revision gets one commit, so that a repeated call uploads what an interrupted one left
        out. A new branch starts from the repository's first commit, and loses all its files but
        .gitattributes; other revisions lose JSON and safetensors files that the export lacks. A
        revision that has the export's certificate and all its file names is left as it is.

        Args:
            exports: Directory of the export by revision, among those given to the constructor.

        Raises:
            InputError: An upload failed, or a revision has changed since it was checked.
        """
        uploaded = []
        with ProgressLine(f"upload to {self.name}", len(exports)) as progress:
            for done, (revision, directory) in enumerate(exports.items()):
                progress.update(done, revision=revision)
                with self._convert_errors("give the same command again to upload the rest"):
                    if self._upload(revision, directory):
                        uploaded.append(revision)
            progress.update(len(exports))
        names = format_paths(uploaded) or "nothing"
        print_rank_0(
            f"{self._api.endpoint}/{self.name}: uploaded {names}; "
            f"{len(exports) - len(uploaded)} of {len(exports)} revisions were there already"
        )

    def _upload(self, revision: str, directory: Path) -> bool:
        """Upload an export to a revision, in one commit, unless it is there already.

        Returns:
            Whether it was uploaded.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        certificate = read_regular_file(directory / CERTIFICATE)
        files = {}
        for file in sorted(directory.rglob("*")):
            name = file.relative_to(directory).as_posix()
            # Desktops and editors leave hidden files.
            if file.is_file() and not f"/{name}".count("/."):
                files[name] = file
        before = self._revisions[revision]
        if before.certificate == certificate and files.keys() <= set(before.names):
            return False
        stale_names = []
        for name in before.names:
            is_stale = before.is_new or name.endswith((".json", ".safetensors"))
            if is_stale and name not in files and name != _GIT_ATTRIBUTES:
                stale_names.append(name)
        if before.is_new:
            # Until the commit below, a branch of main would hold the weights of another step.
            self._api.create_branch(self.name, branch=revision, revision=before.head, exist_ok=True)
        commit = self._api.create_commit(
            self.name,
            [
                *(CommitOperationAdd(name, file) for name, file in files.items()),
                *(CommitOperationDelete(name) for name in stale_names),
            ],
            commit_message=f"Upload step {parse_json(certificate)['step']}",
            revision=revision,
            parent_commit=before.head,  # the Hub refuses the commit if others came first
        )
        names = self._api.list_repo_files(self.name, revision=commit.oid)
        if left_out := sorted(files.keys() - set(names)):
            raise InputError(
                f"--push {self.name}: revision {revision} lacks {format_paths(left_out)}, expected "
                "all files of the export; remove .gitignore from the revision"
            )
        return True

    def _read_certificate(
        self, revision: str, head: str, names: Sequence[str], identity: str
    ) -> bytes:
        """Return the certificate of the export in a revision; empty if there is none.

        Raises:
            InputError: The revision holds a model that is not of the run.
        """
        if CERTIFICATE in names:
            with tempfile.TemporaryDirectory() as directory:
                file = Path(
                    self._api.hf_hub_download(
                        self.name, CERTIFICATE, revision=head, local_dir=directory
                    )
                )
                values = read_json_or_empty(file)
                content = read_regular_file(file)
            if values.get("identity") == identity:
                return content
            model = f"run {values.get('run', 'unknown')}"
        else:
            model_files = [name for name in names if name.lower().endswith(_MODEL_SUFFIXES)]
            if not model_files:
                return b""
            model = format_paths(model_files)
        raise InputError(
            f"--push {self.name}: revision {revision} holds another model than this run's "
            f"({model}); expected another repository"
        )

    @contextlib.contextmanager
    def _convert_errors(self, advice: str) -> Iterator[None]:
        """Convert errors of the Hub to an InputError that ends in `advice`."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # of many types: HTTP, the Hub, the uploader, the file system
            if type(error) is RuntimeError:  # of the uploader
                error = error.__cause__ or error
            reason = getattr(error, "server_message", None) or format_error(error)
            status = getattr(getattr(error, "response", None), "status_code", None)
            answer = "" if status is None else f"the Hub answers {status}: "
            raise InputError(f"--push {self.name}: {answer}{reason}; {advice}") from None
