"""`insitu trajectories show`: an episode of a run as its calls, dialogues and rows."""

import gzip
import io
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from factories import MODEL
from processes import forked_python

from insitu.cli import main
from insitu.runs.episodes import token_texts
from insitu.runs.records import training_records
from insitu.runs.replay import StoredRun
from insitu.runs.store import RunStore
from insitu.schemas.episodes import DropReason, Episode, EpisodeKey, EpisodeStatus, ModelCall
from insitu.schemas.finetuning import Trajectory
from insitu.schemas.groups import GroupRecord
from insitu.workflow import event_loop


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(
    index: int, messages: list[dict[str, Any]], answer: Any, tokens: tuple[list[int], list[int]], **other: Any
) -> Any:
    prompt, sampled = tokens
    known = {"functions": ("<workflow>", "play"), "llm": "player", "finish_reason": "stop", "policy_version": 3}
    said = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    logprobs = [-0.5] * len(sampled)
    values = {"prompt_token_ids": prompt, "token_ids": sampled, "message": said, "logprobs": logprobs, **known, **other}
    return ModelCall(index, "m", messages, **values)


def episode(generation: int, row: str = "r 1", attempt: int = 0, **other: Any) -> Episode:
    first = [user("move?")]
    second = [*first, {"role": "assistant", "content": "4"}, user("\x1b[31mtaken\nagain \\n")]
    judged = {"llm": "judge", "token_ids": None, "prompt_token_ids": None, "usage": {"prompt_tokens": 9}}
    calls = [
        call(0, first, "4", ([1, 5], [7, 2])),
        call(1, [user("judge")], "good", ([], []), **judged),
        call(2, second, "5", ([1, 5, 7, 2, 6], [3])),
    ]
    rewards = {"reward": 0.5, "step_rewards": [0.25, 0.0, 0.0], "rewarded_functions": ["play"]}
    values = {"output": "won", "calls": calls, "seconds": 1.5, **rewards, **other}
    return Episode(EpisodeKey("run_1", 1, row, generation, attempt), EpisodeStatus.OK, **values)


def failed(generation: int, row: str, reward: float | None = None, attempt: int = 0) -> Episode:
    made = episode(generation, row, attempt, reward=reward, step_rewards=None, output=None)
    made.outcome, made.reason, made.error = EpisodeStatus.FAILED, DropReason.TIMEOUT, "EpisodeTimeout: no answer"
    made.failed_requests = {"http 503": 2}
    return made


def trajectory(of: Episode) -> Trajectory:
    return Trajectory.model_construct(id=of.key.text(), reward=of.reward, calls=of.calls)


class Run:
    """A run's directory as the loop writes it."""

    def __init__(self, folder: Path, epoch_over: bool = True, **metrics: Any) -> None:
        self.folder = folder
        self.store = RunStore(folder)
        advantages = {"baseline": "mean", "scale": "none", "epsilon": 1e-6}
        self.store.write("run.json", {"credit": "step", "discount": 0.5, "advantages": advantages})
        if epoch_over:
            self.store.append("training_metrics.jsonl", [{"epoch": 1, "job": "completed", **metrics}])

    def add(self, row: str, *episodes: Episode) -> None:
        kept = [trajectory(e) for e in episodes if e.reward is not None]
        dropped = Counter(str(e.reason) for e in episodes if e.reward is None)
        self.store.append_group(GroupRecord(row, list(episodes), kept, dropped), episodes[0].key.epoch)

    def weigh(self, advantages: dict[int, float | None], *episodes: Episode, dropped: str | None = None) -> None:
        collected = [trajectory(e) for e in episodes]
        reasons = {} if dropped is None else {str(t.id): dropped for t in collected}
        weighed = [(t, advantages) for t in collected if not reasons]
        self.store.append("advantages.jsonl", training_records(1, collected, reasons, weighed))


@pytest.fixture
def run(tmp_path: Path) -> Iterable[Path]:
    """A run of three groups: one trained with a penalised member, one left out, one with a failed member."""
    made = Run(tmp_path / "run")
    made.add("r 1", episode(0), failed(1, "r 1", -1.0, attempt=2))
    made.add("r2", episode(0, "r2"), episode(1, "r2"))
    made.add("r/3", episode(0, "r/3"), failed(1, "r/3"))
    made.weigh({0: 0.75, 2: -0.25}, episode(0))
    made.weigh({0: -0.75, 2: -0.75}, failed(1, "r 1", -1.0, attempt=2))
    made.weigh({}, episode(0, "r2"), episode(1, "r2"), dropped="no_variance")
    made.weigh({}, episode(0, "r/3"), dropped="single_member")
    made.store.close()
    return made.folder


class Shown(NamedTuple):
    code: Any
    out: str
    err: str


def show(*arguments: Any, command: str = "show") -> Shown:
    """The command in this process, to what is no terminal."""
    out, err, argv, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["insitu", "trajectories", command, *map(str, arguments)]
    event_loop.left_behind.clear()  # by other tests: the command would end this process
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
    return Shown(code, out.getvalue(), err.getvalue())


def test_an_episode_that_was_trained(run: Path) -> None:
    shown = show(run, "--row", "r 1", "--generation", 0, "--tokens").out
    assert shown.splitlines() == [
        "episode run_1/1/r 1/0/0",
        "  ok  reward 0.5  7 prompt + 3 sampled tokens  policy version 3  1.50 s",
        "  group rewards: [0.5], -1",
        "  trained with 2 of 3 calls",
        "  answer: won",
        "",
        "calls",
        "   0  player in <workflow> > play  0.00-0.00 s  2 + 2 tokens  stop  reward 0.25  advantage +0.75  row 1",
        "   1  judge in <workflow> > play  0.00-0.00 s  9 + ? tokens  stop  not trained",
        "   2  player in <workflow> > play  0.00-0.00 s  5 + 1 tokens  stop  reward 0  advantage -0.25  row 1",
        "",
        "conversation 1",
        "  user: move?",
        "  assistant [call 0]: 4",
        "  user: \\x1b[31mtaken",
        "    again \\n",
        "  assistant [call 2]: 5",
        "",
        "conversation 2",
        "  user: judge",
        "  assistant [call 1]: good",
        "",
        "rows",
        "  row 1: calls 0, 2; 6 tokens, 3 of them trained",
        "    context, 2 tokens: 1 5",
        "    call 0: 7 (-0.500) 2 (-0.500)",
        "    context, 1 token: 6",
        "    call 2: 3 (-0.500)",
        "  the texts of the tokens are unknown: name the folder of the model with --tokenizer",
    ]


def test_tokens_are_shown_as_text(run: Path) -> None:
    """By the tokenizer of the run's backend, or that of a folder that is named."""
    for option in (("--tokenizer", MODEL), ()):
        shown = show(run, "--row", "r 1", "--generation", 0, "--tokens", *option).out.splitlines()
        assert shown[-4:] == [
            "    context, 2 tokens: '<|system|>\"'",
            "    call 0: '$' (-0.500) '<|user|>' (-0.500)",
            "    context, 1 token: '#'",
            "    call 2: '<|assistant|>' (-0.500)",
        ]
        checkpoint = run / "backend/checkpoints/step_000001"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    missing = show(run, "--row", "r 1", "--generation", 0, "--tokens", "--tokenizer", run)
    assert (missing.code, missing.out) == (2, "")
    assert (
        missing.err
        == f"error: --tokenizer: {run / 'tokenizer.json'} does not exist; give the folder of the run's model\n"
    )


@pytest.mark.parametrize(
    ("options", "listed"),
    [
        (["--outcome", "failed"], ["r 1/1/2", "r/3/1/0"]),
        (["--outcome", "trained"], ["r 1/0/0", "r 1/1/2"]),
        (["--outcome", "no_variance"], ["r2/0/0", "r2/1/0"]),
        (["--outcome", "ok", "--limit", "2"], ["r 1/0/0", "r2/0/0"]),
        (["--min-reward", "0.5"], ["r 1/0/0", "r2/0/0", "r2/1/0", "r/3/0/0"]),
        (["--outcome", "timeout", "--sort", "reward"], ["r 1/1/2", "r/3/1/0"]),
        (["--outcome", "timeout", "--sort", "reward", "--reverse"], ["r/3/1/0", "r 1/1/2"]),
    ],
)
def test_episodes_are_selected_and_sorted(run: Path, options: list[str], listed: list[str]) -> None:
    shown = show(run, *options)
    assert shown.code == 0, shown.err
    assert [line.split("  ")[0].removeprefix("run_1/1/") for line in shown.out.splitlines()] == listed


def test_failed_episodes_that_were_dropped_later_are_found_by_either_reason(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    members = [failed(generation, "r", reward=0.0) for generation in (0, 1)]
    made.add("r", *members)
    made.weigh({}, *members, dropped="no_variance")
    made.store.close()
    for reason in ("timeout", "no_variance"):
        assert len(show(made.folder, "--outcome", reason).out.splitlines()) == 2


def test_the_one_episode_that_is_left_is_shown(run: Path) -> None:
    assert show(run, "--sort", "reward", "--limit", "1").out.startswith("episode run_1/1/r 1/0/0\n")


def test_a_selection_of_nothing_is_refused(run: Path) -> None:
    problem = f"error: {run}: no episode has --row 'r2' and --generation 4; "
    problem += "of --generation beside --row 'r2', available: 0, 1\n"
    assert show(run, "--row", "r2", "--generation", 4).err == problem


def test_a_failed_episode_says_why_and_whether_it_was_trained_all_the_same(run: Path) -> None:
    priced = show(run, "--episode", "run_1/1/r 1/1/2").out.splitlines()
    assert priced[1:7] == [
        "  failed: timeout  reward -1  7 prompt + 3 sampled tokens  policy version 3  1.50 s",
        "  EpisodeTimeout: no answer",
        "  attempt 3; earlier attempts failed",
        "  failed requests: 2 http 503",
        "  group rewards: 0.5, [-1]",
        "  trained with 2 of 3 calls",
    ]
    left_out = show(run, "--row", "r/3", "--generation", 1).out
    assert "  failed: timeout  reward none  " in left_out
    assert "  group rewards: 0.5; dropped: 1 timeout\n  dropped: timeout\n" in left_out
    assert "advantage" not in left_out
    assert "rows if all calls were trained\n  row 1: calls 0, 2; 6 tokens, 3 of them sampled" in left_out
    assert "  dropped: no_variance\n" in show(run, "--row", "r2", "--generation", 0).out


def test_several_are_listed_with_what_became_of_them(run: Path) -> None:
    listed = show(run, "--epoch", 1).out.splitlines()
    assert listed == [
        "run_1/1/r 1/0/0  reward 0.5     3 calls   trained",
        "run_1/1/r 1/1/2  reward -1      3 calls   trained  failed: timeout",
        "run_1/1/r2/0/0   reward 0.5     3 calls   dropped: no_variance",
        "run_1/1/r2/1/0   reward 0.5     3 calls   dropped: no_variance",
        "run_1/1/r/3/0/0  reward 0.5     3 calls   dropped: single_member",
        "run_1/1/r/3/1/0  reward none    3 calls   dropped: timeout",
    ]
    first, failed, *_ = show(run, "--epoch", 1, "--answers").out.splitlines()
    assert (first, failed) == (f"{listed[0]}  'won'", listed[1])


def test_what_a_server_weighs_is_told_as_sent(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    made.store.write("run.json", {"advantages": "computed by the ART server"})
    made.add("r1", episode(0, "r1"), episode(1, "r1"))
    made.weigh({2: None}, episode(0, "r1"), episode(1, "r1"))
    made.store.close()
    shown = show(made.folder, "--row", "r1", "--generation", 1).out
    assert "  sent with 1 of 3 calls\n" in shown
    parts = [line.partition("stop  ")[2] for line in shown.splitlines() if "tokens  stop" in line]
    assert parts == ["reward 0.25  context  row 1", "not trained", "reward 0  sent  row 1"]
    assert "rows by exact prefix; the server builds its own\n" in shown
    assert "row 1: calls 0, 2; 6 tokens, 1 of them trained" in shown
    assert show(made.folder).out.splitlines()[0].endswith("3 calls   sent")


def test_calls_whose_prompts_nobody_knows_are_in_no_row(tmp_path: Path) -> None:
    """Servers of ART make them anew from the messages, and need not tell them."""
    made = Run(tmp_path / "run")
    calls = [call(0, [user("hi")], "ho", ([], [7]), prompt_token_ids=None)]
    made.add("r1", episode(0, "r1", calls=calls, step_rewards=None))
    made.weigh({0: None}, episode(0, "r1"))
    made.store.close()
    shown = show(made.folder, "--row", "r1").out
    assert "  ? + 1 tokens  stop  sent\n" in shown
    assert shown.endswith("\n  none: the token ids of these calls are unknown\n")


@pytest.mark.parametrize(
    ("over", "metrics", "advantages", "status"),
    [
        (False, {}, None, "not trained yet"),
        (False, {}, {0: 1.0}, "not trained yet"),
        (True, {"job": "failed"}, {0: 1.0}, "job failed"),
        (True, {}, None, "not recorded"),
    ],
    ids=["collecting", "training", "failed job", "no record"],
)
def test_what_is_not_trained_is_not_told_as_trained(
    tmp_path: Path, over: bool, metrics: Any, advantages: Any, status: str
) -> None:
    made = Run(tmp_path / "run", over, **metrics)
    made.add("r1", episode(0, "r1"), episode(1, "r1"))
    if advantages is not None:
        made.weigh(advantages, episode(0, "r1"), episode(1, "r1"))
    made.store.close()
    assert all(line.endswith(f"  {status}") for line in show(made.folder).out.splitlines())
    shown = show(made.folder, "--generation", 0).out
    assert f"\n  {status}\n" in shown
    rows = shown.partition("\nrows")[2]
    if advantages is None:
        assert rows == " if all calls were trained\n  row 1: calls 0, 2; 6 tokens, 3 of them sampled\n"
    else:
        assert rows == "\n  row 1: calls 0, 2; 6 tokens, 2 of them to train\n"


def test_a_run_without_a_record_of_its_advantages_is_read(run: Path) -> None:
    (run / "advantages.jsonl").unlink()
    assert show(run).out.splitlines()[0].endswith("3 calls   not recorded")
    shown = show(run, "--row", "r 1", "--generation", 0)
    assert (shown.code, shown.err) == (0, "")
    assert "\n  not recorded\n" in shown.out


def test_a_line_that_is_being_written_is_not_there_yet(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("episodes.jsonl.gz", "calls.jsonl.gz"):
        with (run / name).open("ab") as file:
            file.write(gzip.compress(b"a group")[:-3])
    for name in ("groups.jsonl", "advantages.jsonl", "training_metrics.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'{"episode":"run_1/1/r2/0')
    assert len(show(run).out.splitlines()) == 6
    assert f"{run / 'groups.jsonl'}: skipped an incomplete last line" in caplog.text
    assert show(run, "--row", "r2", "--generation", 0).code == 0
    (run / "groups.jsonl").write_bytes(b'{"for')
    assert show(run).err == f"error: {run} has no episode yet\n"


@pytest.mark.parametrize("name", ["episodes.jsonl.gz", "calls.jsonl.gz"])
def test_groups_that_a_power_failure_cut_off_are_reported(
    run: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(run / name, (run / name).stat().st_size - 1)
    assert len(show(run).out.splitlines()) == 4
    assert f"{run / name} has " in caplog.text
    assert "were written: the file is damaged; skipped the groups from row 'r/3' of epoch 1 on" in caplog.text


@pytest.mark.parametrize("name", ["episodes.jsonl.gz", "calls.jsonl.gz"])
def test_a_damaged_group_is_one_sentence(run: Path, name: str) -> None:
    data = bytearray((run / name).read_bytes())
    data[-9] ^= 0xFF
    (run / name).write_bytes(data)
    shown = show(run, "--row", "r/3", "--generation", 0)
    assert shown.code == 1
    assert re.fullmatch(rf"failed: {re.escape(str(run / name))}, bytes \d+ to {len(data)} are damaged: .+\n", shown.err)


def test_a_long_text_is_cut(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    named = call(0, [user("x" * 3000)], "answer", ([0], [1]), functions=("<workflow>",))
    made.add("r1", episode(0, "r1", calls=[named], step_rewards=None))
    made.store.close()
    assert f"  user: {'x' * 2000} ... 1000 more characters (--full)\n" in show(made.folder).out
    assert "x" * 3000 in show(made.folder, "--full").out


def test_what_a_call_may_hold_beside_text(tmp_path: Path) -> None:
    looked = {"id": "t", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    asked = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [looked]}
    picture = {"role": "user", "content": [{"type": "text", "text": "this?"}, {"type": "image_url", "image_url": {}}]}
    tools = [{"type": "function", "function": {"name": "look"}}]
    calls = [
        call(0, [picture], asked, ([1], [2]), tools=tools),
        call(
            1,
            [picture],
            None,
            ([1], [3]),
            error="the stream ended before all choices were finished",
            finish_reason=None,
        ),
        call(2, [picture], "a\ud800", ([1], [4]), choice=1),
    ]
    made = Run(tmp_path / "run")
    made.add("r1", *(episode(k, "r1", calls=[c], step_rewards=None) for k, c in enumerate(calls)))
    made.store.close()
    shown = show(made.folder, "--generation", 0).out
    assert "  stop  tools look  row 1\n" in shown
    assert "  user: this?\n    [image_url]\n" in shown
    assert '  assistant [call 0]: [reasoning] hm\n    -> look({"at": "sky"})\n' in shown
    broken = show(made.folder, "--generation", 1).out
    assert "  1 + 1 tokens  the stream ended before all choices were finished  row 1\n" in broken
    assert "conversation" not in broken
    other = show(made.folder, "--generation", 2).out
    assert "  stop  choice 1  row 1\n" in other
    assert "  assistant [call 2]: a\\ud800\n" in other


def test_a_reader_that_goes_away_is_no_failure(run: Path) -> None:
    command = f"{forked_python()} -m insitu trajectories show '{run}' | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("run_1/1/r 1/0/0  reward 0.5     3 calls   trained\n", "")


def test_a_terminal_gets_colours_and_a_hint_and_a_pipe_gets_neither(run: Path) -> None:
    def on_terminal(*options: str) -> str:
        ours, theirs = pty.openpty()
        command = [forked_python(), "-m", "insitu", "trajectories", "show", str(run), *options]
        with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL) as process:
            os.close(theirs)
            shown = b""
            try:
                while piece := os.read(ours, 65536):
                    shown += piece
            except OSError:  # how a terminal of which nobody holds the other end is read to its end
                pass
            finally:
                os.close(ours)
        assert process.returncode == 0
        return shown.decode()

    assert on_terminal().splitlines()[-1] == (
        "6 episodes; choose one with --epoch, --row and --generation, or --episode"
    )
    one = ("--row", "r2", "--generation", "0")
    assert "\x1b[33mdropped: no_variance\x1b[0m" in on_terminal(*one)
    assert "\x1b" not in show(run, *one).out


@pytest.mark.parametrize("text", ["aé十🙂!", "🙂" * 50, "", "é"])
def test_the_texts_of_tokens_are_together_that_of_all(text: str) -> None:
    """Where a character has several tokens, the last of them has it."""

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    ids = text.encode()
    expected = [part for c in text for part in [""] * (len(c.encode()) - 1) + [c]]
    assert token_texts(decode, ids) == expected
    for damaged in (b"\xff" * 30, b"a\xe5\x8d", b"\xe5ab\xff", b"\x80" * 3 + ids):
        assert "".join(token_texts(decode, damaged)) == decode(damaged)


def test_what_is_not_there_is_refused(run: Path) -> None:
    for arguments, says in (
        (("--row", "r1"), "no episode has --row 'r1'; of --row, similar: r 1\n"),
        (("--row", "other"), "no episode has --row 'other'; of --row, available: r 1, r2, r/3\n"),
        (("--episode", "r2"), "of --episode, similar: run_1/1/r2/0/0, run_1/1/r2/1/0\n"),
        (("--epoch", "7"), "of --epoch, available: 1\n"),
        (
            ("--outcome", "lost"),
            "of --outcome, available: ok, trained, failed, timeout, no_variance ... (7 in total)\n",
        ),
        (("--row", "x", "--epoch", "7"), "no episode has --epoch 7 and --row 'x'; of --epoch, available: 1\n"),
        (("--min_reward", "2"), "no episode has --min_reward 2.0; of --min_reward, the highest is 0.5\n"),
    ):
        missing = show(run, *arguments)
        assert (missing.code, missing.out) == (2, "")
        assert says in missing.err
    nothing = show(run / "nowhere")
    assert nothing.code == 2
    assert "is not a run directory: episodes.jsonl.gz is missing" in nothing.err
    (run / "groups.jsonl").write_text('{"format": 99}\n')
    assert "has format 99; supported: 2" in show(run).err
    (run / "groups.jsonl").write_text('{"format":2}\nnonsense\n')
    broken = show(run)
    assert (broken.code, "line 2 is not JSON" in broken.err) == (1, True)


@pytest.mark.parametrize("content", ["", '{"run_id": "ins', "[1]", '"text"', "\udcff"])
def test_a_damaged_run_json_is_named(run: Path, content: str) -> None:
    (run / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    shown = show(run, "--row", "r 1", "--generation", 0)
    assert shown.code == 1
    assert shown.err.startswith(f"failed: {run / 'run.json'} is not ")
    assert len(shown.err.splitlines()) == 1


def test_a_name_among_many_and_an_episode_without_calls(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    for row in [*range(1250, 1300), 1999]:
        made.add(f"train-{row:05}", episode(0, f"train-{row:05}", calls=[]))
    named = call(0, [user("run_1/1/train-01999/0/0")], "run_1/1/train-01999/0/0", ([1], [2]))
    made.add("last", episode(0, "last", calls=[named]))
    made.store.close()
    listed = show(made.folder, "--row", "train-01999").out
    assert listed.startswith("episode run_1/1/train-01999/0/0\n")
    assert "none: the token ids of these calls are unknown" in listed


def test_an_epoch_without_a_job_is_not_trained_yet(tmp_path: Path) -> None:
    """The run was interrupted before its job had ended."""
    made = Run(tmp_path / "run", epoch_over=False)
    made.store.append("training_metrics.jsonl", [{"epoch": 1, "job": None}])
    made.add("r 1", episode(0))
    made.store.close()
    assert "not trained yet" in show(made.folder).out


async def test_what_another_run_did_not_train_is_decided_again(tmp_path: Path) -> None:
    made = Run(tmp_path / "run")
    untrained = {"reason": DropReason.NO_TARGET_CALLS, "error": "the model calls of judge are trained"}
    made.add("r 1", episode(0, **untrained), failed(1, "r 1"))
    names = [f"run_1/1/r 1/{number}/0" for number in range(2)]
    scored = {"evaluator": "again", "score": 1.0, "step_scores": [0.5, 0.0, 0.5], "config_hash": "c", "dataset": "d"}
    made.store.append("rescores.jsonl", [{"episode": name, **scored} for name in names])
    made.store.close()
    [[first, second]] = [group async for group in StoredRun(made.folder).replay("run_2", 1)]
    assert (first.reason, first.error) == (None, None)
    assert (second.reason, second.error) == (DropReason.TIMEOUT, "EpisodeTimeout: no answer")
    [[first, _]] = [group async for group in StoredRun(made.folder, reward="again").replay("run_2", 1)]
    assert (first.reward, first.step_rewards) == (1.0, [0.5, 0.0, 0.5])
    assert first.rewarded_functions == ["<workflow>", "play"]
