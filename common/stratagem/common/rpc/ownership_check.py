"""Makes a servicer check that what a request names is for its caller, before the handler sees it.

Owns how the rules of `authorization.TABLE` are put before the handlers of a servicer: all of them,
or the class is not made. What belongs to whom the servicer knows.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, TypeVar

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from stratagem.common.identity.authentication import Caller, current_caller
from stratagem.common.identity.authorization import TABLE, UNCHECKED, Names

Check = Callable[[Any, Any, Caller], Awaitable[None] | None]
"""Of the servicer, the request and the caller: raises when what is named is not for that one. Of a
stream the first request."""

S = TypeVar("S")


def checks_what_is_named(
    service: ServiceDescriptor, checks: Mapping[Names, Check]
) -> Callable[[type[S]], type[S]]:
    """A class decorator for the servicer of a service. KeyError names a call or a check that is
    missing."""

    def decorate(servicer: type[S]) -> type[S]:
        for method in service.methods:
            names = TABLE[f"/{service.full_name}/{method.name}"].names
            if names not in UNCHECKED:
                handler = getattr(servicer, method.name)
                setattr(servicer, method.name, _checked(handler, method, checks[names]))
        return servicer

    return decorate


def _checked(handler: Any, method: MethodDescriptor, check: Check) -> Any:
    async def look(servicer: Any, request: Any) -> None:
        waiting = check(servicer, request, current_caller())
        if waiting is not None:
            await waiting

    if method.client_streaming:

        @wraps(handler)
        def call_stream(servicer: Any, requests: AsyncIterator[Any], context: Any) -> Any:
            first = _FirstChecked(requests, lambda request: look(servicer, request))
            return handler(servicer, first, context)

        return call_stream
    if method.server_streaming:

        @wraps(handler)
        def call_streaming(servicer: Any, request: Any, context: Any) -> Any:
            answers = handler(servicer, request, context)
            return _AnswersOnceChecked(answers, look(servicer, request))

        return call_streaming

    @wraps(handler)
    async def call(servicer: Any, request: Any, context: Any) -> Any:
        await look(servicer, request)
        return await handler(servicer, request, context)

    return call


class _FirstChecked:
    """A stream of requests, the first of which is looked at; costs the others nothing."""

    __slots__ = ("_look", "_requests")

    def __init__(
        self, requests: AsyncIterator[Any], look: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._requests = aiter(requests)
        self._look: Callable[[Any], Awaitable[None]] | None = look

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._requests) if self._look is None else self._first(self._look)

    async def _first(self, look: Callable[[Any], Awaitable[None]]) -> Any:
        request = await anext(self._requests)
        self._look = None
        await look(request)
        return request


class _AnswersOnceChecked:
    """The answers of a handler that begins once its request was looked at; as cheap."""

    __slots__ = ("_answers", "_look")

    def __init__(self, answers: AsyncGenerator[Any, None], look: Coroutine[Any, Any, None]) -> None:
        self._answers = answers
        self._look: Coroutine[Any, Any, None] | None = look

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._answers) if self._look is None else self._first()

    async def _first(self) -> Any:
        look, self._look = self._look, None
        if look is not None:
            await look
        return await anext(self._answers)

    async def aclose(self) -> None:
        """The handler ends, wherever it is."""
        if self._look is not None:
            self._look.close()
        await self._answers.aclose()
