"""Upload of exports to a repository of models on the Hugging Face Hub."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megaenc.console import ProgressLine, format_paths, print_rank_0
from megaenc.errors import InputError, format_error
from megaenc.json_files import parse_json, read_json_or_empty, read_regular_file

CERTIFICATE = "conversion.json"
MAIN = "main"


class HubRepository:
    """Repository of models on the Hugging Face Hub that this user may write to.

    Each revision holds one export of the same run.
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
        token = get_token()
        if token is None:
            raise InputError(
                f"--push {name}: found no token of the Hugging Face Hub; "
                "give `hf auth login`, or set HF_TOKEN"
            )
        self._api = HfApi(token=token)
        with self._convert_errors("check the token's right to write, and the network"):
            self._api.create_repo(name, private=True, exist_ok=True)
            self._api.auth_check(name, write=True)
            branches = {branch.name for branch in self._api.list_repo_refs(name).branches}
            self._certificates = {
                revision: self._read_certificate(revision, identity)
                for revision in revisions
                if revision in branches
            }

    def upload(self, exports: Mapping[str, Path]) -> None:
        """Upload exports that the Hub lacks, in order, and print what was uploaded.

        A revision (a branch) appears complete or not at all, so that a repeated call uploads only
        what an interrupted one left out. If its conversion.json is the export's, it stays as it is
        and counts as there already. A new one starts without the files of others; in an
        existing one, JSON and safetensors files that are not of the export are removed.

        Args:
            exports: Directory of the export by revision, among those given to the constructor.

        Raises:
            InputError: An upload failed.
        """
        uploaded = []
        with ProgressLine(f"upload to {self.name}", len(exports)) as progress:
            for done, (revision, directory) in enumerate(exports.items()):
                progress.update(done, revision=revision)
                certificate = read_regular_file(directory / CERTIFICATE)
                if self._certificates.get(revision) != certificate:
                    with self._convert_errors("give the same command again to upload the rest"):
                        self._upload(revision, directory, parse_json(certificate)["step"])
                    uploaded.append(revision)
            progress.update(len(exports))
        names = format_paths(uploaded) or "nothing"
        print_rank_0(
            f"{self._api.endpoint}/{self.name}: uploaded {names}; "
            f"{len(exports) - len(uploaded)} of {len(exports)} revisions were there already"
        )

    def _upload(self, revision: str, directory: Path, step: int) -> None:
        """Upload an export to a revision, in one commit."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        if revision not in self._certificates:
            # Until the commit below, a branch of main would hold the weights of another step.
            first_commit = self._api.list_repo_commits(self.name)[-1].commit_id
            self._api.create_branch(
                self.name, branch=revision, revision=first_commit, exist_ok=True
            )
        files = {
            file.relative_to(directory).as_posix(): file
            for file in sorted(directory.rglob("*"))
            if file.is_file()
        }
        stale_names = [
            name
            for name in self._api.list_repo_files(self.name, revision=revision)
            if name.endswith((".json", ".safetensors")) and name not in files
        ]
        self._api.create_commit(
            self.name,
            [
                *(CommitOperationAdd(name, file) for name, file in files.items()),
                *(CommitOperationDelete(name) for name in stale_names),
            ],
            commit_message=f"Upload step {step}",
            revision=revision,
        )

    def _read_certificate(self, revision: str, identity: str) -> bytes:
        """Return the certificate of the export in a revision; empty if there is none.

        Raises:
            InputError: The revision holds a model that is not of the run.
        """
        files = self._api.list_repo_files(self.name, revision=revision)
        values = {}
        content = b""
        if CERTIFICATE in files:
            with tempfile.TemporaryDirectory() as directory:
                file = Path(
                    self._api.hf_hub_download(
                        self.name, CERTIFICATE, revision=revision, local_dir=directory
                    )
                )
                values = read_json_or_empty(file)
                content = read_regular_file(file)
        elif "config.json" not in files:
            return b""
        if values.get("identity") != identity:
            raise InputError(
                f"--push {self.name}: revision {revision} holds another model than this run's "
                f"(run {values.get('run', 'unknown')}); expected another repository"
            )
        return content

    @contextlib.contextmanager
    def _convert_errors(self, advice: str) -> Iterator[None]:
        """Convert errors of the Hub to an InputError that ends in `advice`."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # of many types: HTTP, the Hub, the uploader, the file system
            cause = error.__cause__ if type(error) is RuntimeError else None
            reason = getattr(error, "server_message", None) or format_error(cause or error)
            status = getattr(getattr(error, "response", None), "status_code", None)
            answer = "" if status is None else f"the Hub answers {status}: "
            raise InputError(f"--push {self.name}: {answer}{reason}; {advice}") from None
