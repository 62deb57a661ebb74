"""`bireme init`: a run file to start from."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bireme.cli.options import check_suffix, print_json
from bireme.errors import BiremeError, closest

if TYPE_CHECKING:
    from bireme.train.run_file.recipes import Recipe

PURPOSES = "finetune, lora, qlora, pretrain, own-model, machines"


def init(
    path: Path = Path("run.toml"),
    purpose: Annotated[str | None, {"words": PURPOSES}] = None,
    model: str | None = None,
    data: str | None = None,
    source: Path | None = None,
    everything: bool = False,
    force: bool = False,
    as_json: bool = False,
) -> None:
    """Write a run file for `bireme train`: what one purpose needs, or with --all every key, explained.

    [dim]bireme init lora.toml --for lora --model models/llama --data chats.jsonl[/dim]

    Arguments:
        path (PATH): Run file to write.

    Options:
        purpose (--for PURPOSE): Write only what this purpose needs: {}. Asked for in a terminal.
        model (MODEL): Model to train, from which values follow: a folder of transformers, or as in
            model.source.
        data (DATA): Data to train on: a file, a folder, or as in data.source.
        source (--from FILE.yml): Translate a configuration of axolotl or LLaMA-Factory.
        everything (--all): Write every key, explained and commented out with its default.
        force: Overwrite an existing file.
    """
    check_suffix(path, "run file", ".toml")
    is_there = path.exists() or path.is_symlink()
    if is_there and not force:
        raise BiremeError(f"{path} already exists. Name another file, or overwrite it with --force.")
    _check_together(purpose, model, data, source, everything=everything)
    from bireme.files import write_text_atomically
    from bireme.train.run_file import commented_toml

    command, more = f"bireme train {shlex.quote(str(path))}", dict[str, Any]()
    named = bool(purpose or model or data)
    asks = not (named or source or everything or as_json) and sys.stdin.isatty()
    if asks:
        purpose, model, data = _asked()
    if source is not None:
        text, more = _translated_toml(path, source)
    elif purpose is None:
        text = commented_toml()
    else:
        recipe = _recipe(purpose)
        command = recipe.command.format(path=shlex.quote(str(path)))
        text = _recipe_text(path, purpose, recipe, model, data, command)
    write_text_atomically(path, text)
    if as_json:
        print_json({"path": str(path), "replaced": is_there, "next": command, **more})
        return
    has_all = purpose is None and source is None
    typer.echo(
        f"{path} has every key of a run, commented out, with its default."
        if has_all
        else f"{path}:\n\n{text}"
    )
    typer.echo(f"Edit it, then run: {command}")
    typer.echo(f"Or set keys for a single run: {command} --set training.steps=1000")


def _check_together(
    purpose: str | None, model: str | None, data: str | None, source: Path | None, *, everything: bool
) -> None:
    """Refuse options of which one makes another meaningless."""
    if purpose is not None:
        _recipe(purpose)
    given = {"--for": purpose, "--model": model, "--data": data}
    names = [name for name, value in given.items() if value is not None]
    first = "--all" if everything else "--from" if source is not None else None
    if first is not None and (names or (everything and source is not None)):
        other = names[0] if names else "--from"
        raise BiremeError(f"{first} and {other} exclude each other. Leave out one of the two.")
    if names and purpose is None:
        raise BiremeError(f"{names[0]} needs a purpose. Add --for with one of: {PURPOSES}.")


def _recipe(purpose: str) -> "Recipe":
    from bireme.train.run_file.recipes import RECIPES

    if purpose not in RECIPES:
        raise BiremeError(f"There is no recipe {purpose!r}. {closest(purpose, list(RECIPES))}")
    return RECIPES[purpose]


def _asked() -> tuple[str, str | None, str | None]:
    """Purpose, model and data, from a person at the terminal."""
    from bireme.train.run_file.recipes import RECIPES

    for name, recipe in RECIPES.items():
        typer.echo(f"  {name:10} {recipe.title}")

    def ask(question: str, usual: str | None, check: Callable[[str], object]) -> str:
        while True:
            answer: str = typer.prompt(question, default=usual)
            try:
                check(answer.strip())
            except BiremeError as error:
                typer.echo(str(error), err=True)
            else:
                return answer.strip()

    purpose = ask("What for?", "lora", _recipe)
    recipe = _recipe(purpose)
    usual = None if recipe.starts_from_weights else recipe.model
    model = ask("Which model?", usual, lambda text: _model_source(recipe, text))
    data = ask("Which data?", None, _rows)
    return purpose, model, data


def _recipe_text(
    path: Path, purpose: str, recipe: "Recipe", model: str | None, data: str | None, command: str
) -> str:
    """The run file of a recipe, with what the model and the data that were named say."""
    from bireme.documents import toml_value
    from bireme.train.run_file import load_run_file
    from bireme.train.run_file.recipes import recipe_toml

    values, about = dict(recipe.values), dict[str, str]()
    values["model.source"] = recipe.model if model is None else _model_source(recipe, model)
    values["data.source"] = recipe.data if data is None else data
    if recipe.model.startswith("gpt:") and _has_weights(str(values["model.source"])):
        values["model.from_scratch"] = True
    if data is not None:
        num_rows, holds = _rows(data)
        about |= {"data.source": holds} if holds else {}
        size = values.get("training.batch_size", 32)
        while num_rows and size > 1 and num_rows < _FEWEST_STEPS * size:
            size //= 2
        values["training.batch_size"] = size
    run = load_run_file(None, [f"{key}={toml_value(value)}" for key, value in values.items()])
    if data is not None and model is not None:
        from bireme.train.run_data import with_length_of_data

        run = with_length_of_data(run)
    given = (("--for", purpose), ("--model", model), ("--data", data))
    words = " ".join(f"{name} {shlex.quote(value)}" for name, value in given if value is not None)
    beginning = (
        f"For {purpose}: {recipe.title}.\n"
        f"Written by: bireme init {shlex.quote(str(path))} {words}\n"
        f"Train: {command}    All other keys: bireme init all.toml --all"
    )
    return recipe_toml(recipe, run, beginning, about)


_FEWEST_STEPS = 16
"""Steps of an epoch below which the batch is made smaller."""


def _model_source(recipe: "Recipe", text: str) -> str:
    """The value of model.source for a model that was named; a `BiremeError` if there is none."""
    from bireme.user_code import names_function, user_function

    if recipe.model == "model.py:model":
        user_function(text, "a model")
        return text
    kind = text.partition(":")[0]
    if kind == "gpt" and not recipe.starts_from_weights:
        return text
    folder = Path(text.removeprefix("hf:")).expanduser()
    if not (folder / "config.json").is_file():
        what = "names a function, which is for --for own-model" if names_function(text) else "is no folder"
        raise BiremeError(
            f"{text} {'has no config.json' if folder.is_dir() else what}. Name a folder of a transformers "
            "model; nothing is downloaded."
        )
    if recipe.starts_from_weights and not _has_weights(f"hf:{folder}"):
        raise BiremeError(f"{folder} has no weights to start from. Use --for pretrain to train new ones.")
    return f"hf:{text.removeprefix('hf:')}"


def _has_weights(source: str) -> bool:
    from bireme.model.shapes import has_weights
    from bireme.train.run_file.defaults import folder_of

    folder = folder_of(source)
    return folder is not None and has_weights(folder)


def _rows(text: str) -> tuple[int | None, str]:
    """The number of rows of data, if it is known, and what they hold in a few words; opens the data."""
    from bireme.train.data.hub import SavedRows
    from bireme.train.data.source import open_source

    found = open_source(text)
    if not isinstance(found, SavedRows):
        return None, ""
    counts = "; only answers count in the loss" if found.has_answers else ""
    size = "a stream of" if found.size is None else f"{found.size:,} rows:"
    return found.size, f"{size} {found.content}{counts}"


def _translated_toml(path: Path, source: Path) -> tuple[str, dict[str, Any]]:
    """The run file of another program's configuration, and what became of its keys."""
    from bireme.train.run_file import load_run_file
    from bireme.train.run_file.foreign import translated
    from bireme.train.run_file.recipes import short_toml

    found = translated(source)
    load_run_file(None, found.settings)
    idle = ", ".join(found.idle)
    beginning = f"From {source}, a configuration of {found.dialect.program}." + (
        f"\nWithout effect here: {idle}" if idle else ""
    )
    document = {"translated": dict(found.values), "without_effect": dict(found.idle)}
    return short_toml(found.values, found.remarks, beginning), document
