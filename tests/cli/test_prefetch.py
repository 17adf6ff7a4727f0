"""Fetching a model: the real huggingface_hub client against a stand-in for the hub, a small HTTP server on
this machine.

The stand-in speaks as much of the hub's protocol as snapshot_download asks for; the hub itself cannot be had
in a test.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlparse

import pytest

from tests.cli.test_commands import omnirl, said

REPO, COMMIT = "someone/tiny-qwen-image", "c0ffee" + "0" * 34


class Hub:
    """Serves the files of one folder as one repository. `requests` remembers the files that were sent."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent, self.left_out = folder, [], set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = unquote(urlparse(self.path).path)
                if path in (f"/api/models/{REPO}", f"/api/models/{REPO}/revision/{COMMIT}"):
                    self.answer(
                        json.dumps(
                            {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": f} for f in hub.files()]}
                        )
                    )
                elif path == f"/api/models/{REPO}/tree/{COMMIT}":
                    self.answer(json.dumps([hub.entry(file) for file in hub.files()]))
                elif path.startswith(start := f"/{REPO}/resolve/{COMMIT}/"):
                    file = path.removeprefix(start)
                    if self.command == "GET":
                        hub.sent.append(file)
                    content = (hub.folder / file).read_bytes()
                    self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hub.entry(file)["oid"]}"'})
                else:
                    self.answer("{}", {"X-Error-Code": "RepoNotFound"}, 404)

            do_HEAD = do_GET

            def answer(
                self,
                content: str | bytes,
                headers: Mapping[str, str] = MappingProxyType({}),
                status: int = 200,
            ) -> None:
                content = content.encode() if isinstance(content, str) else content
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self) -> list[str]:
        every = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return sorted(file for file in every if file not in self.left_out)

    def entry(self, file: str) -> dict[str, object]:
        content = (self.folder / file).read_bytes()
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@pytest.fixture
def hub(tiny_model):
    hub = Hub(tiny_model)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def prefetch(folder: Path, *overrides: str, endpoint: str, **environ: str):
    environ = {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(folder.parent / "home"),
        "NO_PROXY": "*",
    } | environ
    return omnirl("prefetch", "recipe=flowgrpo_qwen_image", f"model.path={folder}", *overrides, **environ)


def test_everything_is_fetched_and_what_is_there_is_kept(hub, tiny_model, tmp_path):
    folder = tmp_path / "model"
    result = prefetch(folder, f"model.repo={REPO}", endpoint=hub.endpoint)
    assert result.returncode == 0, result.stderr
    assert (
        "TORCH False" in result.stdout
        and f"{REPO} (commit {COMMIT}) is complete in {folder}" in result.stdout
    )
    assert (
        f"RECIPE=flowgrpo_qwen_image MODEL={folder} PROMPTS=TABLE.parquet sbatch "
        "sbatch/flowgrpo_qwen_image.sh" in result.stdout
    )
    assert all((folder / file).read_bytes() == (tiny_model / file).read_bytes() for file in hub.files())

    lost = "vae/config.json"
    (folder / lost).unlink()
    hub.sent.clear()
    assert prefetch(folder, f"model.repo={REPO}", endpoint=hub.endpoint).returncode == 0
    assert (folder / lost).is_file() and hub.sent == [lost]


def test_a_repository_that_is_not_complete(hub, tmp_path):
    hub.left_out = {"transformer/diffusion_pytorch_model.safetensors"}
    result = prefetch(tmp_path / "model", f"model.repo={REPO}", endpoint=hub.endpoint)
    assert result.returncode == 1 and "is not complete: transformer/ has no *.safetensors" in result.stderr


def test_the_weights_of_what_cannot_be_trained_are_not_fetched(tiny_model, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    index = json.loads((other / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "QwenImageEditPlusPipeline"}))
    hub = Hub(other)
    result = prefetch(tmp_path / "model", f"model.repo={REPO}", endpoint=hub.endpoint)
    hub.server.shutdown()
    hub.server.server_close()
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "names the pipeline QwenImageEditPlusPipeline, not QwenImagePipeline" in result.stderr
    assert hub.sent and not any(file.endswith(".safetensors") for file in hub.sent)


def test_without_a_network_nothing_is_taken_for_complete(hub, tmp_path):
    assert prefetch(tmp_path / "model", f"model.repo={REPO}", endpoint=hub.endpoint).returncode == 0
    result = prefetch(tmp_path / "model", f"model.repo={REPO}", endpoint="http://127.0.0.1:1")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("omnirl-hpc prefetch: the hub cannot be reached (") and "a login node" in line


def test_what_cannot_be_fetched_is_one_sentence(hub, tmp_path):
    folder = tmp_path / "model"
    missing = prefetch(folder, "model.repo=someone/else", endpoint=hub.endpoint)
    assert "model.repo=someone/else does not exist on the hub, or is private" in said(missing)
    assert "model.repo=a/b/c is not a repository's name" in said(
        prefetch(folder, "model.repo=a/b/c", endpoint=hub.endpoint)
    )
    offline = prefetch(folder, endpoint=hub.endpoint, HF_HUB_OFFLINE="1")
    assert (
        said(offline) == "omnirl-hpc prefetch: HF_HUB_OFFLINE=1 forbids downloads: unset it on the login node"
    )
    tiny = omnirl("prefetch", "recipe=flowgrpo_tiny", f"model.path={folder}")
    assert "recipe=flowgrpo_tiny names no repository of a model" in said(tiny)
