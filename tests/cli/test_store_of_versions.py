"""`pulse publish`, `log`, `pull`, `verify`, `follow`."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulse import MemoryWeights, Publisher, checkpoint
from pulse.digest import digest_of
from tests.cli.samples import PULSE, weights


@pytest.fixture
def store(pulse, checkpoints, tmp_path) -> Path:
    """A store with the three checkpoints as versions 0 to 2, of steps 10 to 12."""
    for i, path in enumerate(checkpoints):
        assert pulse("publish", "store", path, "--step", 10 + i).code == 0
    return tmp_path / "store"


def test_publishing_checkpoints_one_after_the_other_makes_an_anchor_and_patches(pulse, store):
    versions = pulse("log", store, "--json").json["versions"]
    assert [version["kind"] for version in versions] == ["anchor", "patch", "patch"]
    assert [version["step"] for version in versions] == [10, 11, 12]
    assert pulse("log", store, "-n", 1).out.splitlines()[-1].startswith("2")


def test_every_version_can_be_pulled_and_is_the_checkpoint_that_was_published(pulse, store, checkpoints, tmp_path):
    for version, path in enumerate(checkpoints):
        assert pulse("pull", f"{store}@{version}", f"{version}-again.safetensors").code == 0
        assert (tmp_path / f"{version}-again.safetensors").read_bytes() == path.read_bytes()
    assert pulse("pull", f"{store}@step:11", "step11").code == 0
    assert checkpoint.read(tmp_path / "step11") == checkpoint.read(checkpoints[1])


def test_versions_of_a_store_can_be_compared(pulse, store, checkpoints):
    seen = pulse("diff", f"{store}@0", f"{store}@newest", "--json").json
    assert seen["result"] == digest_of(checkpoint.read(checkpoints[2]))


def test_files_beside_a_checkpoint_come_out_again(pulse, tmp_path):
    checkpoint.write(tmp_path / "model", weights(0))
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    pulse("publish", "store", "model")
    pulse("pull", "store", "pulled")
    assert (tmp_path / "pulled" / "config.json").read_text() == '{"a": 1}'


def test_verify_proves_a_version_and_exits_1_when_a_payload_was_altered(pulse, store):
    assert pulse("verify", store, "--json").json["verified"] is True
    patch = min((store / "payloads").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(patch.read_bytes())
    data[-1] ^= 1
    patch.write_bytes(data)
    refused = pulse("verify", store)
    assert refused.code == 1
    assert "DigestMismatch" in refused.err


@pytest.mark.parametrize("command", ["log", "verify", "pull"])
def test_a_store_that_is_not_there_is_one_clear_line(pulse, command):
    refused = pulse(command, "nowhere", *(["out"] if command == "pull" else []))
    assert refused.code == 1
    assert "no such folder" in refused.err


def test_a_version_that_is_not_there_is_named_beside_the_newest(pulse, store):
    assert "the newest is 2" in pulse("pull", f"{store}@7", "out").err
    assert "no version of step 99" in pulse("pull", f"{store}@step:99", "out").err


def test_a_manifest_cut_short_is_one_clear_line(pulse, store):
    newest = store / "manifests" / "000000000002.json"
    newest.write_bytes(newest.read_bytes()[:100])
    for command in (("log", store), ("verify", store), ("follow", store, "dir", "--once")):
        refused = pulse(*command)
        assert refused.code == 1
        assert "FormatError" in refused.err


def test_follow_once_gives_a_directory_that_loads(pulse, store, checkpoints, tmp_path):
    done = pulse("follow", store, "dir", "--once")
    assert done.code == 0
    assert "version 2" in done.out
    assert checkpoint.read(tmp_path / "dir" / "current") == checkpoint.read(checkpoints[2])
    assert (tmp_path / "dir" / "current").is_symlink()


def test_follow_takes_patches_up_where_it_stopped_and_keeps_two_versions(pulse, store, checkpoints, tmp_path):
    pulse("follow", store, "dir", "--once")
    for i in (0, 1):
        pulse("publish", store, checkpoints[i])
        done = pulse("follow", store, "dir", "--once")
        assert "1 patch," in done.out
        assert checkpoint.read(tmp_path / "dir" / "current") == checkpoint.read(checkpoints[i])
    assert len(list((tmp_path / "dir" / "versions").iterdir())) == 2


def test_follow_repairs_a_directory_that_was_damaged(pulse, store, checkpoints, tmp_path):
    pulse("follow", store, "dir", "--once")
    model = tmp_path / "dir" / "current" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-3] ^= 1
    model.write_bytes(data)
    assert pulse("follow", store, "dir", "--once").code == 0
    assert checkpoint.read(tmp_path / "dir" / "current") == checkpoint.read(checkpoints[2])
    pulse("publish", store, checkpoints[0])
    assert "1 patch," in pulse("follow", store, "dir", "--once").out
    assert checkpoint.read(tmp_path / "dir" / "current") == checkpoint.read(checkpoints[0])


def test_follow_refuses_a_directory_of_another_run(pulse, store, checkpoints):
    pulse("follow", store, "dir", "--once")
    pulse("publish", "other", checkpoints[0])
    refused = pulse("follow", "other", "dir", "--once")
    assert refused.code == 1
    assert "which is not in" in refused.err


def test_two_followers_do_not_share_a_directory(pulse, store, tmp_path):
    first = subprocess.Popen([PULSE, "follow", store, tmp_path / "dir"], stdout=subprocess.PIPE, text=True)
    try:
        first.stdout.readline()
        refused = pulse("follow", store, "dir", "--once")
        assert refused.code == 1
        assert "another process" in refused.err
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        first.stdout.close()


def test_a_follower_killed_twenty_times_always_leaves_a_whole_version_and_arrives(tmp_path):
    """SIGKILL while versions keep coming: `current` leads to one published version, and the next follower goes on from there."""
    tensors = weights(0)
    published = {0: digest_of(tensors)}
    done = threading.Event()

    def publish() -> None:
        newest = tensors
        held = MemoryWeights(newest)
        with Publisher(tmp_path / "store", held, anchor_every=20) as publisher:
            for seed in itertools.count():
                for name, bits in newest.items():
                    held.assign(name, bits)
                receipt = publisher.publish()
                published[receipt.version] = receipt.state_digest
                if done.is_set():
                    return
                newest = weights(seed + 1, 0.02, newest)
                time.sleep(0.005)

    current, behind, torn = tmp_path / "dir" / "current", 0, 0
    with ThreadPoolExecutor(1) as background:
        publishing = background.submit(publish)
        for kill in range(20):
            process = subprocess.Popen([PULSE, "follow", tmp_path / "store", tmp_path / "dir"], stdout=subprocess.PIPE, text=True)
            process.stdout.readline()  # it has followed once, and is at work on the next version by now
            time.sleep(0.0013 * kill)
            process.kill()
            process.communicate()
            version = json.loads((current / "pulse.json").read_text())["version"]
            assert digest_of(checkpoint.read(current)) == published[version]
            behind += version < max(published)
            torn += any(path.name.startswith(".") for path in (tmp_path / "dir" / "versions").iterdir())
        done.set()
        publishing.result()
    assert behind >= 5, "the kills met a follower with nothing to do"
    print(f"{behind} of 20 kills left versions to fetch, {torn} a directory half written")
    arrived = subprocess.run(
        [PULSE, "follow", tmp_path / "store", tmp_path / "dir", "--once"], check=True, capture_output=True, text=True, timeout=60
    )
    assert f"version {max(published)}" in arrived.stdout
    assert digest_of(checkpoint.read(current)) == published[max(published)]
    assert not [path for path in (tmp_path / "dir" / "versions").iterdir() if path.name.startswith(".")]


def test_log_marks_every_anchor_that_was_added_later(pulse, tmp_path, checkpoints):
    for i in range(5):
        pulse("publish", "store", checkpoints[i % 3], "--anchor-every", 2)
    seen = pulse("log", "store", "--json").json["versions"]
    assert [version["version"] for version in seen if version["anchor"]] == [0, 2]
    pulse("publish", "store", checkpoints[0], "--anchor-every", 2)
    seen = pulse("log", "store", "--json").json["versions"]
    assert [version["version"] for version in seen if version["anchor"]] == [0, 2, 4]


def test_follow_stops_by_itself_when_told_how_long_to_wait(pulse, store):
    assert pulse("follow", store, "dir", "--timeout", 0.5).code == 0


def test_follow_on_a_full_disk_leaves_current_as_it_was(pulse, store, checkpoints, small_disk):
    assert pulse("follow", store, small_disk / "dir", "--once").code == 0
    before = checkpoint.read(small_disk / "dir" / "current")
    pulse("publish", store, checkpoints[0])
    import shutil

    (small_disk / "filler").write_bytes(b"x" * max(shutil.disk_usage(small_disk).free - 4096, 0))
    refused = pulse("follow", store, small_disk / "dir", "--once")
    assert refused.code == 1
    assert "No space left on device" in refused.err
    assert checkpoint.read(small_disk / "dir" / "current") == before
    (small_disk / "filler").unlink()
    assert pulse("follow", store, small_disk / "dir", "--once").code == 0
    assert checkpoint.read(small_disk / "dir" / "current") == checkpoint.read(checkpoints[0])


def test_a_changed_config_reaches_those_who_pull(pulse, tmp_path):
    checkpoint.write(tmp_path / "model", weights(0))
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    pulse("publish", "store", "model")
    (tmp_path / "model" / "config.json").write_text('{"a": 2}')
    published = pulse("publish", "store", "model", "--json").json
    assert (published["kind"], published["reason"]) == ("anchor", "the files beside the weights are others now")
    pulse("pull", "store", "pulled")
    assert (tmp_path / "pulled" / "config.json").read_text() == '{"a": 2}'


def test_a_checkpoint_without_files_keeps_those_of_the_run(pulse, tmp_path, checkpoints):
    checkpoint.write(tmp_path / "model", checkpoint.read(checkpoints[0]))
    (tmp_path / "model" / "config.json").write_text('{"a": 1}')
    pulse("publish", "store", "model")
    assert pulse("publish", "store", checkpoints[1], "--anchor-every", 1, "--json").json["kind"] == "patch"
    assert pulse("publish", "store", checkpoints[2], "--json").json["newest_anchor"] == 1
    pulse("pull", "store", "pulled")
    assert (tmp_path / "pulled" / "config.json").read_text() == '{"a": 1}'


def test_a_store_named_with_a_version_is_refused_where_none_belongs(pulse, store, checkpoints):
    assert "without @VERSION" in pulse("publish", "store@0", checkpoints[0]).err
    assert "without @VERSION" in pulse("log", "store@0").err
    assert "VERSION is a number" in pulse("pull", "store@latest", "out").err


def test_a_store_in_memory_and_the_store_itself_are_no_targets(pulse, store, checkpoints):
    assert "ends with this command" in pulse("publish", "memory://x", checkpoints[0]).err
    assert "the store itself" in pulse("follow", store, store).err


def test_a_follower_outlasts_damage_that_is_mended_and_says_what_it_waits_for(pulse, store, checkpoints, tmp_path):
    pulse("follow", store, "dir", "--once")
    pulse("publish", store, checkpoints[0])
    (store / "payloads").rename(store / "away")
    process = subprocess.Popen([PULSE, "follow", store, tmp_path / "dir"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "asking again in" in process.stderr.readline()
        (store / "away").rename(store / "payloads")
        assert "version 3" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_follower_may_start_before_the_first_version(pulse, checkpoints, tmp_path):
    process = subprocess.Popen(
        [PULSE, "follow", tmp_path / "store", tmp_path / "dir", "--timeout", "30"], stdout=subprocess.PIPE, text=True
    )
    try:
        pulse("publish", "store", checkpoints[0])
        assert "version 0" in process.stdout.readline()
    finally:
        process.kill()
        process.communicate()


def test_follow_writes_one_json_object_a_line(pulse, store):
    lines = pulse("follow", store, "dir", "--once", "--json").out.splitlines()
    assert [json.loads(line)["version"] for line in lines] == [2, 2]


@pytest.mark.parametrize("options", [[], ["--compress-anchors"]], ids=["plain", "compressed"])
@pytest.mark.parametrize("damage", ["payload", "name"])
def test_an_anchor_that_is_damaged_is_passed_by_for_an_older_one(pulse, tmp_path, checkpoints, damage, options):
    for path in checkpoints:
        pulse("publish", "store", path, "--anchor-every", 1, *options)
    pulse("publish", "store", checkpoints[0], "--anchor-every", 9)
    named = tmp_path / "store" / "anchors" / "000000000002.json"
    assert pulse("verify", "store", "--json").json["anchor"] == 2
    digest = json.loads(named.read_text())["anchor"]["weights"][0]["payload"]["sha256"]
    victim = named if damage == "name" else tmp_path / "store" / "payloads" / digest
    victim.write_bytes(victim.read_bytes()[:50])
    seen = pulse("verify", "store", "--json").json
    assert (seen["anchor"], seen["patches"]) == (1, 2)
    logged = pulse("log", "store", "--json").json["versions"][2]
    assert logged["anchor"]
    assert (logged["anchor_bytes"] is None) == (damage == "name")


def test_compressed_anchors_are_pulled_and_followed_as_the_files_that_plain_ones_give(pulse, tmp_path):
    trace = Path(__file__).parents[1] / "data" / "trace"
    steps = sorted(trace.glob("*.safetensors"))
    for store, options in (("plain", []), ("compressed", ["--compress-anchors"])):
        done = [pulse("publish", store, step, "--anchor-every", 1, *options) for step in steps]
        assert ("smaller than the whole" in done[0].out) == (store == "compressed")
        assert pulse("verify", store).code == 0
        pulse("pull", f"{store}@0", f"{store}-0")
        pulse("pull", store, f"{store}-newest")
        assert pulse("follow", store, f"{store}-followed", "--once").code == 0
    for kind, step in (("0", steps[0]), ("newest", steps[-1]), ("followed/current", steps[-1])):
        pulled = [(tmp_path / f"{store}-{kind}" / "model.safetensors").read_bytes() for store in ("plain", "compressed")]
        assert pulled[0] == pulled[1]
        assert checkpoint.read(tmp_path / f"compressed-{kind}") == checkpoint.read(step)


def test_log_says_the_size_of_every_anchor_and_whether_it_is_compressed(pulse, tmp_path):
    steps = sorted((Path(__file__).parents[1] / "data" / "trace").glob("*.safetensors"))
    for step, options in zip(steps, ([], ["--anchor-every", 1, "--compress-anchors"], []), strict=True):
        pulse("publish", "store", step, *options)
    lines = pulse("log", "store").out.splitlines()
    assert lines[1].split()[-4:] == ["B/change", "anchor", "state", "digest"]
    assert " compressed " not in lines[2]
    assert " compressed " in lines[3]
    plain, late, patch = pulse("log", "store", "--json").json["versions"]
    assert (plain["anchor_compressed"], late["anchor_compressed"], patch["anchor_compressed"]) == (False, True, None)
    assert (late["kind"], patch["anchor_bytes"]) == ("patch", None)
    assert plain["anchor_bytes"] == plain["bytes"] >= plain["full_bytes"]
    assert late["anchor_bytes"] <= 0.70 * late["full_bytes"]


def test_follow_without_a_version_to_follow_is_an_error_once_it_no_longer_waits(pulse):
    for options in (("--once",), ("--timeout", "0.5")):
        refused = pulse("follow", "typo", "dir", *options)
        assert refused.code == 1
        assert "nothing is published" in refused.err
