"""The command line: one file per command, each imported only when it is called."""

import gc
import importlib.util
import io
import os
import re
import signal
import sys

import click

_COMMANDS = {
    "init": "Write a small project to start from.",
    "train": "Train the model behind a function, without a file.",
    "finetune": "Train the model behind a workflow.",
    "eval": "Score a workflow on a dataset.",
    "run": "Run a workflow on one input.",
    "ask": "Ask the trained agent of a run.",
    "validate": "Check a file and its datasets; starts nothing.",
    "doctor": "Say before a run whether it will learn, and what it will cost.",
    "trajectories": "Inspect, export and score the recorded episodes of a run.",
    "runs": "List, show, fork and prune runs.",
    "view": "Show runs in a browser, also while they are written.",
    "export": "Write a checkpoint of a run as a Hugging Face folder.",
    "promote": "Export the best version of a run if it beats what it replaces.",
    "serve": "Serve a workflow for `--endpoint` and POST /generate.",
    "schema": "Print a JSON Schema of the YAML file, for editors.",
    "env": "Print what a bug report needs.",
    "backend": "Serve and train a model: inference and training jobs on one port.",
}


class _LazyGroup(click.Group):
    """Lists the commands without importing them, which keeps `--help` fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"insitu.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "token_normalize_func": lambda name: name.replace("-", "_"),  # `--config-file` works like `--config_file`
}


@click.group(cls=_LazyGroup, context_settings=_SETTINGS)
@click.option("-v", "--verbose", count=True, help="Log to standard error (-vv: everything).")
@click.option("--log_format", type=click.Choice(("text", "json")), help="Log with times, also the progress of a run.")
@click.version_option(package_name="insitu", message="%(version)s")
def insitu(verbose: int, log_format: str | None) -> None:
    """insitu improves a language model from inside the agent workflow that uses it."""
    if verbose or log_format is not None:
        import logging

        from insitu.wire.log_lines import configure_logging

        configure_logging((logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)], log_format)
        if verbose == 1:
            for name in ("httpx", "httpx2"):  # they log a line per request
                logging.getLogger(name).setLevel(logging.WARNING)


def _warn_of_original_toolkit() -> None:
    """Prints a note if `nat.*` is the original toolkit, because its plugins do not register with insitu."""
    try:
        spec = importlib.util.find_spec("nat.builder") or importlib.util.find_spec("nat")
    except ModuleNotFoundError:
        return
    if spec is not None and type(spec.loader).__module__ != "nat":
        where = next(iter(spec.submodule_search_locations or ()), spec.origin)
        print(f"note: nat.* is another toolkit ({where}): insitu does not load plugins written for it", file=sys.stderr)


def main() -> None:
    """Runs a command and exits: 0 success, 1 failed, 2 invalid command line or file, 130 interrupted."""
    from insitu.wire.redaction import redact_stream, remember_environment

    remember_environment(os.environ)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell: the next file to be opened would take its place
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (as long as the process)
    redact_stream(sys.stdout)
    redact_stream(sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):  # end a command as Ctrl-C does; under nohup, the second is ignored
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    if json_lines := re.search(r"(?:^|\0)--log[-_]format[=\0]json(?:\0|$)", "\0".join(sys.argv[1:])) is not None:
        from insitu.wire.log_lines import write_json_lines

        write_json_lines(sys.stderr)
    code = _run(json_lines)
    event_loop = sys.modules.get("insitu.workflow.event_loop")
    if event_loop is not None and event_loop.left_behind:  # Python would wait for what does not end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    gc.collect()
    gc.freeze()  # Python would search all that is left for cycles again and again
    sys.exit(code)


def _say(text: str) -> None:
    """Says why a command ends; with --log_format as a log line."""
    from insitu.wire.log_lines import log_line

    print(log_line(text), file=sys.stderr)


def _run(json_lines: bool) -> int:
    from insitu.errors import ConfigError, InsituError, memory_problem

    _warn_of_original_toolkit()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a model may write characters that the console cannot show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = insitu.main(standalone_mode=False)  # the argument of ctx.exit()
    except click.ClickException as error:
        _say(f"error: {error.format_message()}") if json_lines else error.show()
        return 2
    except click.exceptions.Exit as error:
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted")
        return 130
    except ConfigError as error:
        _say(f"error: {error}")
        return 2
    except (InsituError, OSError) as error:  # OSError: a full disk, a file that cannot be written
        _say(f"failed: {error}")
        return 1
    except Exception as error:  # a lack of memory, which libraries report in many ways; anything else is re-raised
        if (problem := memory_problem(error)) is None:
            raise
        _say(f"failed: out of memory: {problem}")
        return 1
    return code if isinstance(code, int) else 0
