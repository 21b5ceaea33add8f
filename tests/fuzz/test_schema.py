"""What the schema promises and what it forbids, signed afresh each time, against the real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import requests
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from requests.auth import AuthBase
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from miner.http import subnet
from tests.miner.http.daemon_process import DaemonProcess


def _schema() -> schemathesis.BaseSchema:
    app = FastAPI(openapi_url=None)  # as in production: the schema is there, but not served
    subnet.add_routes(app)
    return schemathesis.openapi.from_dict(app.openapi())


schema = _schema()


class Signed(AuthBase):
    """Signs the bytes that will really be sent, whatever they are."""

    def __init__(self, target: DaemonProcess) -> None:
        self._target = target

    def __call__(self, prepared: requests.PreparedRequest) -> requests.PreparedRequest:
        body = prepared.body.encode() if isinstance(prepared.body, str) else prepared.body or b""
        prepared.headers.update(self._target.headers(body if prepared.method == "POST" else None))
        return prepared


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        # A connection kept open may be closed for idleness at the very moment of its next use.
        session.headers["connection"] = "close"
        yield session


@schema.parametrize()
@settings(suppress_health_check=list(HealthCheck))
def test_every_request_gets_json_and_only_a_yes_leaves_a_trace(
    case: schemathesis.Case, target: DaemonProcess, session: requests.Session
) -> None:
    before = target.counts()
    response = case.call(base_url=target.stack.url, session=session, auth=Signed(target))
    case.validate_response(
        response, checks=[not_a_server_error, content_type_conformance, response_schema_conformance]
    )
    assert response.status_code < 500
    answer = json.loads(response.content)
    if response.status_code >= 400:
        assert answer["error"]
        assert answer["message"]
        assert target.counts() == before
    if response.status_code == 422:
        assert all(set(field) <= {"field", "message", "value"} for field in answer["fields"])
