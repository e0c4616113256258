"""Names on the Hub: one commit, only what is read, one sentence where it cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from huggingface_hub import constants

from megatrain import hub as hub_module
from megatrain.disk.hf.folder import read_folder
from megatrain.errors import ConfigError, HubError, ModelConfigError, ModelFolderError
from megatrain.hub import dataset_commit, find_model, is_id
from testkit.hub_on_loopback import Files, Hub, serving, use
from testkit.patience import HANG_S, eventually

NAME = "acme/tiny"
CONFIG = b'{"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}'


def _weights(*names: str) -> bytes:
    header = {
        name: {"dtype": "BF16", "shape": [2], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


def _model(**more: bytes) -> Files:
    files = {
        "config.json": CONFIG,
        "generation_config.json": b"{}",
        "tokenizer.json": b"{ }",
        "tokenizer_config.json": b"{  }",
        "model.safetensors": _weights("w"),
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"print()",
        "README.md": b"# tiny",
        "onnx/model.onnx": b"onnx",
    }
    return files | more


SHARDS = ("model-1-of-2.safetensors", "model-2-of-2.safetensors")


def _sharded() -> Files:
    files = _model()
    del files["model.safetensors"]
    index = {"weight_map": dict(zip("ab", SHARDS, strict=True))}
    return files | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARDS[0]: _weights("a"),
        SHARDS[1]: _weights("b"),
        "consolidated.safetensors": _weights("a", "b"),
    }


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving() as served:
        use(monkeypatch, served.url, str(tmp_path / "cache"))
        yield served


def _go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_model_is_downloaded_without_what_is_not_read(hub: Hub) -> None:
    commit = hub.put(NAME, _model())
    found = find_model(NAME)
    assert found.commit == commit
    assert list(read_folder(found.folder)) == ["w"]
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in found.folder.iterdir()} == kept | {"model.safetensors"}
    assert set(hub.fetched()) == kept | {"model.safetensors"}


def test_a_tokenizer_comes_without_weights_and_a_config_alone(hub: Hub) -> None:
    hub.put(NAME, _model())
    find_model(NAME, need="config")
    assert hub.fetched() == ["config.json"]
    find_model(NAME, need="tokenizer")
    assert "model.safetensors" not in hub.fetched()
    find_model(NAME)
    assert hub.fetched()[-1] == "model.safetensors"
    assert len(hub.fetched()) == len(set(hub.fetched()))


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    hub.put(NAME, _sharded())
    assert set(read_folder(find_model(NAME).folder)) == {"a", "b"}
    assert "consolidated.safetensors" not in hub.fetched()


def test_shards_come_side_by_side(hub: Hub) -> None:
    hub.put(NAME, _sharded())
    both = threading.Barrier(2, timeout=HANG_S)  # broken if one came after the other
    hub.on_file = dict.fromkeys(SHARDS, both.wait)
    assert set(read_folder(find_model(NAME).folder)) == {"a", "b"}
    assert not both.broken


def test_ctrl_c_ends_a_download_that_hangs(hub: Hub) -> None:
    hub.put(NAME, _sharded())
    let_go = threading.Event()

    def hang() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        let_go.wait(HANG_S)

    hub.on_file = {SHARDS[1]: hang}
    try:
        with pytest.raises(KeyboardInterrupt):
            find_model(NAME)
        assert not let_go.is_set()
    finally:
        let_go.set()
    assert eventually(lambda: not _downloads())
    hub.on_file = {}
    assert set(read_folder(find_model(NAME).folder)) == {"a", "b"}


def _downloads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "download"]


def test_a_folder_on_this_disk_wins(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(NAME, _model())
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert find_model(NAME).commit is None
    assert hub.requests == []
    with pytest.raises(ConfigError, match=r"revision is v1, but acme/tiny is a local folder"):
        find_model(NAME, "v1")


def test_a_branch_that_moves_between_two_questions_gives_one_commit(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hub.put(NAME, _model())
    asked = hub_module._asked

    def moving(kind: Literal["model", "dataset"], name: str, revision: str) -> object:
        answer = asked(kind, name, revision)
        if revision == "main":
            hub.put(NAME, _model(**{"model.safetensors": _weights("other")}))
        return answer

    monkeypatch.setattr(hub_module, "_asked", moving)
    found = find_model(NAME)
    assert found.commit != first
    assert list(read_folder(found.folder)) == ["other"]


def test_a_broken_connection_is_resumed_where_it_broke(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = _weights(*(f"w{i}" for i in range(2000)))
    hub.put(NAME, _model(**{"model.safetensors": weights}))
    hub.cuts["model.safetensors"] = [50_000]
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    found = find_model(NAME)
    assert (found.folder / "model.safetensors").read_bytes() == weights
    assert any("bytes=50000-" in line for line in hub.requests)


def test_an_interrupted_download_keeps_the_files_that_are_whole(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(NAME, _model())
    hub.cuts["model.safetensors"] = [1] * 20
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(HubError, match=r"download failed: .*\nComplete files are kept"):
        find_model(NAME)
    hub.cuts.clear()
    hub.requests.clear()
    assert list(read_folder(find_model(NAME).folder)) == ["w"]
    assert hub.fetched() == ["model.safetensors"]


def test_a_model_in_the_cache_needs_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = hub.put(NAME, _model())
    online = find_model(NAME)
    _go_offline(monkeypatch)
    assert find_model(NAME) == online
    assert "HF_HUB_OFFLINE is set; using commit" in capsys.readouterr().err
    hub.requests.clear()
    assert find_model(NAME, commit) == online
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_set", [True, False])
def test_without_network_and_cache_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_set: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, "http://127.0.0.1:9", str(tmp_path))  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_set)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("a retry waits"))
    with pytest.raises(HubError) as caught:
        find_model(NAME)
    text = str(caught.value)
    why = "HF_HUB_OFFLINE is set" if is_set else r"the Hub cannot be reached (ConnectError)"
    for part in (NAME, why, f"`hf download {NAME}`", "HF_HOME", "HF_ENDPOINT", "model folder"):
        assert part in text
    assert "\n" not in text
    assert capfd.readouterr() == ("", "")


def test_weights_that_cannot_be_read_are_refused_before_they_are_downloaded(hub: Hub) -> None:
    config = CONFIG[:-1] + b', "quantization_config": {"quant_method": "awq"}}'
    hub.put(NAME, _model(**{"config.json": config}))
    with pytest.raises(ModelConfigError, match=rf"{NAME}: .*quantization_config is refused"):
        find_model(NAME)
    assert hub.fetched() == ["config.json"]


def test_a_repository_of_other_weights_is_refused(hub: Hub) -> None:
    files = _model()
    del files["model.safetensors"]
    hub.put(NAME, files)
    with pytest.raises(HubError, match=r"no safetensors weights; .*pytorch_model.bin"):
        find_model(NAME)
    assert "pytorch_model.bin" not in hub.fetched()
    hub.put("acme/gguf", {"tiny.gguf": b""})
    with pytest.raises(HubError, match=r"no config.json: .* It has tiny.gguf"):
        find_model("acme/gguf")


def test_an_index_cannot_name_files_elsewhere(hub: Hub) -> None:
    files = _model()
    del files["model.safetensors"]
    index = {"weight_map": {"a": "../../../x.safetensors"}}
    hub.put(NAME, files | {"model.safetensors.index.json": json.dumps(index).encode()})
    with pytest.raises(HubError, match=r"names files that are not weights: \.\./"):
        find_model(NAME)


def test_what_the_hub_refuses_is_said_as_it_is(hub: Hub) -> None:
    hub.put(NAME, _model())
    hub.put("acme/gated", _model())
    hub.gated.add("acme/gated")
    with pytest.raises(HubError, match=r"acme/gated: gated. Accept the terms .* `hf auth login`"):
        find_model("acme/gated")
    with pytest.raises(HubError, match="no such folder here, and the Hub has no model with this"):
        find_model("acme/none")
    with pytest.raises(HubError, match="the Hub has no revision v9"):
        find_model(NAME, "v9")


def test_a_model_in_the_cache_is_used_though_it_is_gated_or_gone_by_now(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.put(NAME, _model())
    online = find_model(NAME)
    hub.gated.add(NAME)
    assert find_model(NAME) == online
    assert "gated. Accept the terms" in capsys.readouterr().err
    hub.gated.clear()
    hub.commits.clear()
    assert find_model(NAME) == online
    assert "the Hub has no model with this name" in capsys.readouterr().err


def test_a_download_that_the_disk_cannot_hold_is_not_begun(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(NAME, _model())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=500 << 20))
    with pytest.raises(HubError, match=r"the download needs .*, where 500.0 MiB are free. Set HF_"):
        find_model(NAME)
    assert hub.fetched() == ["config.json"]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../b",
        "a/b/c",
        "./a",
        "~/a",
        "/a/b",
        "a//b",
        "-a/b",
        "a--b/c",
        "a/b\n",
        "",
        "a/b.",
        "a/b-",
        "a./b",
        "a/b.git",
        "caf\u00e9/x",
        "a" * 97,
    ],
)
def test_what_cannot_be_an_id_is_not_asked_for(
    hub: Hub, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no such folder is
    assert not is_id(name)
    if name:
        with pytest.raises(ModelFolderError, match="no such folder"):
            find_model(name)
    assert hub.requests == []


def _runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "runs/sft1", "runs/sft2"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_bytes(CONFIG)
    (tmp_path / "runs/notes").mkdir()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("runs/nope", ("no run or model of this name in runs; there are sft1, sft2.",)),
        ("runs/sft3", ("Did you mean runs/sft", "sft1, sft2")),
        ("tinny", ("no run or model of this name here", "Did you mean tiny?")),
        ("other", ("there are tiny.", "A Hugging Face Hub id has the form owner/name")),
    ],
)
def test_a_misspelled_folder_is_not_asked_for(
    hub: Hub, name: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs_here(tmp_path, monkeypatch)
    hub.put(name, _model())
    with pytest.raises(ModelFolderError) as caught:
        find_model(name)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert hub.requests == []


def test_a_folder_of_models_is_no_model(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs_here(tmp_path, monkeypatch)
    with pytest.raises(ModelFolderError, match=r"Give one: runs/sft1, runs/sft2\."):
        find_model("runs")
    assert find_model("runs/notes").folder == Path("runs/notes"), "its reader says what is missing"
    (tmp_path / "runs" / "adapter_config.json").write_text("{}")
    assert find_model("runs").folder == Path("runs")


@pytest.mark.parametrize("revision", ["../x", "a/../../b", "/etc", "", "a b", "x" * 300])
def test_a_revision_leads_nowhere_else(hub: Hub, revision: str) -> None:
    for find in (find_model, dataset_commit):
        with pytest.raises(ConfigError, match="not a valid branch, tag or commit"):
            find(NAME, revision)
    assert hub.requests == []


def test_a_dataset_has_a_commit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = hub.put("acme/rows", {"README.md": b"", "train.jsonl": b"{}"}, "datasets")
    assert dataset_commit("acme/rows", None) == (commit, True)
    with pytest.raises(HubError, match="the Hub has no dataset with this name"):
        dataset_commit("acme/none", None)
    _go_offline(monkeypatch)
    assert dataset_commit("acme/rows", None) == (None, False)
    assert dataset_commit("acme/rows", commit) == (commit, False)
