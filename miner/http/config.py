"""The operator's YAML files on the operator's port: list, show, check what is being written, and save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from miner.api.config_files import (
    ConfigFileList,
    ConfigFileText,
    EditedValue,
    FileKind,
    TextCheck,
    TextToCheck,
    TextToSave,
)
from miner.config_files.files import ConfigFiles
from miner.config_files.what_if import CheckOrder, WhatIf
from miner.http.offers import terms_in_force
from miner.http.operator import operator_only


def build_config_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(operator_only)])
    router.add_api_route("/config", list_files, methods=["GET"])
    router.add_api_route("/config/{kind}/{name}", show_file, methods=["GET"])
    router.add_api_route("/config/{kind}/{name}/check", check_file, methods=["POST"])
    # A save is checked and written before another one begins.
    saving = asyncio.Lock()

    async def save_file(kind: FileKind, name: str, wanted: TextToSave, request: Request) -> Any:
        """Replace or create the operator's file, if it is valid and nobody else has changed it."""
        async with saving:
            return await _save_file(kind, name, wanted, request)

    router.add_api_route("/config/{kind}/{name}", save_file, methods=["PUT"])
    return router


def config_files(request: Request) -> ConfigFiles:
    daemon = request.app.state.daemon
    return ConfigFiles(daemon.settings, daemon.policy_runtime)


Files = Annotated[ConfigFiles, Depends(config_files)]


async def list_files(files: Files) -> ConfigFileList:
    """List every profile and policy that has a name, whose it is, and what is in force."""
    return await asyncio.to_thread(files.overview)


async def show_file(
    kind: FileKind, name: str, files: Files, subject: Annotated[str, Query(max_length=100)] = ""
) -> ConfigFileText:
    """Show the text, the values with all that it extends and their origins, and every key that there is."""
    return await asyncio.to_thread(files.show, kind, name, subject)


async def check_file(
    kind: FileKind, name: str, wanted: TextToCheck, files: Files, request: Request
) -> TextCheck:
    """Check a text: problems by line, the difference from what is saved, and the edit's effects."""
    return await _check(kind, name, wanted.text, request, files, effects=wanted.effects)


async def _check(
    kind: FileKind,
    name: str,
    text: str,
    request: Request,
    files: ConfigFiles,
    *,
    effects: bool,
    what: str = "check of a text",
) -> TextCheck:
    daemon = request.app.state.daemon
    what_if: WhatIf = request.app.state.what_if
    file = files.path(kind, name)
    order = CheckOrder(
        kind=kind.value,
        name=name,
        file=str(file),
        directory=str(file.parent),
        text=text,
        saved=await asyncio.to_thread(files.saved_text, kind, name),
        effects=effects,
        terms=terms_in_force(daemon.policy_runtime, daemon.fleet.inventory.installed),
        store_dir=str(daemon.settings.store_dir),
        now=time.time(),
    )
    return await what_if.check(order, what)


async def _save_file(kind: FileKind, name: str, wanted: TextToSave, request: Request) -> Any:
    daemon, files, text = request.app.state.daemon, config_files(request), wanted.text.rstrip() + "\n"
    await asyncio.to_thread(files.check_writable, kind, name)
    checked = await _check(kind, name, text, request, files, effects=False, what="check of a save")
    if not checked.valid:
        refused = {
            "error": "bad_config",
            "message": f"{name}.yaml is not saved: it has mistakes",
            "problems": [problem.model_dump(mode="json") for problem in checked.problems],
        }
        return JSONResponse(refused, HTTPStatus.UNPROCESSABLE_ENTITY)
    await asyncio.to_thread(files.save, kind, name, text, wanted.digest)
    edited = checked.edited
    what = f"{kind.value}/{name}.yaml was saved on the operator's port: {_edits_in_words(edited)}"
    await daemon.store.add_event(
        "config_saved", text=what, edited=[value.model_dump(mode="json") for value in edited]
    )
    # As every second: the reply says whether the file is in force.
    await daemon.reload_files()
    return await asyncio.to_thread(files.show, kind, name)


def _edits_in_words(edited: Sequence[EditedValue]) -> str:
    """`targets.lora_r 16 → 32, and 3 more`."""
    first = [f"{value.path} {_word(value.before)} → {_word(value.after)}" for value in edited[:5]]
    rest = [f"and {len(edited) - 5} more"] if len(edited) > 5 else []
    return ", ".join(first + rest) or "no value has changed"


def _word(value: Any) -> str:
    return "–" if value is None else str(value)[:60]
