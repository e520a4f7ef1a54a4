"""Threads that read records from a store into slots."""

from __future__ import annotations

import threading
from collections.abc import Callable

from runtime.errors import StorageError
from runtime.memory.slots import Slots
from runtime.memory.store import RecordReader
from runtime.memory.transfer import Transfer, TransferQueue

_CHECK_S = 0.25  # how often a waiting stream looks for what no reader will tell it


class ReaderThreads:
    """Move records by threads that each repeat: take a transfer, read it, report. A `Mover`.

    Args:
        count: reads at a time.
        queue: what to read.
        store: where from.
        pool: where to.
        lock: guards the queue.
        arrived: notified, under the lock, when something may have come for whoever waits.
        report: told, under the lock, the transfer and the bytes, or the error.
        crash: told what else a thread raised; it ends then.
    """

    def __init__(
        self,
        count: int,
        queue: TransferQueue,
        store: RecordReader,
        pool: Slots,
        lock: threading.RLock,
        arrived: threading.Condition,
        report: Callable[[Transfer, int | BaseException], None],
        crash: Callable[[BaseException], None],
    ) -> None:
        self._queue, self._store, self._pool = queue, store, pool
        self._lock, self._arrived, self._report, self._crash = lock, arrived, report, crash
        self._work = threading.Condition(lock)  # threads without a transfer wait here
        self._threads = [
            threading.Thread(target=self._loop, name=f"moespeq-reader-{index}", daemon=True) for index in range(count)
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def wake(self, count: int = 1) -> None:
        """See `Mover`; each thread that starts wakes the next."""
        self._work.notify(count)

    def unwatched(self, seconds: float) -> None:
        """The threads need nobody."""

    def wait(self) -> bool:
        """See `Mover`; in a forked child there is no thread."""
        if self._arrived.wait(_CHECK_S):
            return True
        if not any(thread.is_alive() for thread in self._threads):
            raise StorageError(
                expected="running reader threads",
                found="none in this process",
                mend="make the cache in the process that uses it, after any fork",
            )
        return False

    def poll(self) -> None:
        """The threads note what has arrived."""

    def rest(self) -> None:
        """The threads go on."""

    def close(self) -> None:
        """Wait for reads in flight and for the end of the threads that were started."""
        with self._lock:
            self._work.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _loop(self) -> None:
        try:
            while (transfer := self._take()) is not None:
                outcome: int | BaseException
                try:
                    outcome = self._read(transfer)
                except BaseException as error:
                    outcome = error  # it belongs to whoever asked for the record
                with self._lock:
                    self._report(transfer, outcome)
        except BaseException as error:
            self._crash(error)

    def _take(self) -> Transfer | None:
        """Wait for a transfer that can start; None when the queue is closed."""
        with self._lock:
            while not self._queue.closed:
                transfer = self._queue.take()
                if transfer is not None:
                    if self._queue.num_queued:
                        self._work.notify()
                    return transfer
                self._work.wait()
        return None

    def _read(self, transfer: Transfer) -> int:
        return self._store.read_into(transfer.key, self._pool.buffer(transfer.slot), lambda: self._landed(transfer))

    def _landed(self, transfer: Transfer) -> None:
        with self._lock:
            self._queue.leave_link(transfer)
