"""Prepare a dataset beside the one that it will replace.

    with open_staging("data/mine") as staging:                  # data/mine/unfinished, locked against other processes
        staging.take_over(sources, arguments, shards, units)    # finished shards are linked, not copied
        write_atomically(staging.file("train_00001.bin"), data)
        staging.save(arguments, shards, units, stale)           # so that a killed run is gone on with
        ...
        write_atomically(staging.file("meta.json"), ...)        # the dataset is whole now
        staging.finish()                                        # and takes the place of what was there

At any moment the folder holds the old dataset whole, or the new one, or unfinished/ with a whole meta.json, whose move
into the folder the next prepare command completes (is_whole, finish).
"""

import fcntl
import json
import os
import shutil
from contextlib import contextmanager, suppress

from . import DataError
from .files import flush_to_disk, read_json, remove, write_atomically
from .meta import JOURNAL, LOCK, SHARD, UNFINISHED, check_units, read_meta, shards_of
from .tokenizer import FILES


class Staging:
    """The folder in which a dataset is prepared. Attributes: folder (of the dataset), path, arguments, shards, units.

    The last three are what progress.json says of an interrupted run: the arguments of the dataset, {file: shard} as in
    meta.json, and {file: id of its unit}; all empty if there is none.
    """

    def __init__(self, folder):
        self.folder, self.path = folder, os.path.join(folder, UNFINISHED)
        self.arguments, self.shards, self.units = {}, {}, {}
        try:
            saved = read_json(self.file("progress.json"))
            check_units(saved.get("units", {}))
            if all(SHARD.fullmatch(file) and shard["tokens"] >= 0 for file, shard in saved["shards"].items()):
                self.arguments, self.shards, self.units = saved["arguments"], saved["shards"], saved.get("units", {})
        except (FileNotFoundError, DataError, KeyError, TypeError, AttributeError):
            pass  # nothing that could be gone on with

    def file(self, name):
        """Return the path of a file in the folder of the unfinished dataset."""
        return os.path.join(self.path, name)

    def save(self, arguments, shards, units, stale=()):
        """Write progress.json. stale: the files of the old dataset that are not in the new one, for `finish`."""
        self.arguments, self.shards, self.units = arguments, shards, units
        progress = {"arguments": arguments, "shards": shards, "units": units, "stale": list(stale)}
        write_atomically(self.file("progress.json"), json.dumps(progress).encode())

    def take_over(self, sources, arguments, shards, units):
        """Make the shards {file: path of a finished shard} part of this dataset, and save the progress.

        A path in this folder may get another number. All other files in the folder are deleted, but for the journal.
        """
        stay = {file for file, path in sources.items() if path == self.file(file)}
        # Until the new names are there, progress.json must not name a file that is being replaced.
        self.save(arguments, *({file: of[file] for file in stay if file in of} for of in (shards, units)))
        temporary = {file: self.file(f"{file}.{os.getpid()}.tmp") for file in sources.keys() - stay}
        for file, path in temporary.items():
            remove(path)
            _link(sources[file], path)
        for name in os.listdir(self.path):
            stays = name in ("progress.json", JOURNAL, LOCK) or name in stay
            if not stays and self.file(name) not in temporary.values():
                remove(self.file(name))
        for file, path in temporary.items():
            os.replace(path, self.file(file))
        self.save(arguments, shards, units)

    def is_whole(self):
        """Return True if the dataset in here only has to be moved into its folder."""
        try:
            return bool(read_meta(self.path))
        except (FileNotFoundError, DataError):
            return False

    def finish(self):
        """Let the dataset in here take the place of the one in the folder.

        Between the first and the last step the folder has no meta.json, so that nothing reads a mixture.
        """
        try:
            stale = read_json(self.file("progress.json"))["stale"]
        except (FileNotFoundError, DataError, KeyError):
            stale = []
        meta = read_meta(self.path)
        for name in ("meta.json", *shards_of(meta), *FILES):
            if os.path.isdir(path := os.path.join(self.folder, name)):
                raise DataError(f"{path} is a folder, there must be a file: move it away")
        remove(os.path.join(self.folder, "meta.json"))
        for name in stale:
            if SHARD.fullmatch(name) or name in (*FILES, "progress.json"):
                remove(os.path.join(self.folder, name))
        for name in (*FILES, *shards_of(meta)):  # tokenizer.json is the first: it shows that the others are ours
            if os.path.lexists(self.file(name)):
                os.replace(self.file(name), os.path.join(self.folder, name))
        remove(self.file("progress.json"))
        flush_to_disk(self.folder)
        os.replace(self.file("meta.json"), os.path.join(self.folder, "meta.json"))
        flush_to_disk(self.folder)
        self.clear()

    def clear(self):
        """Delete the folder, if nothing else is in it."""
        if not os.path.isdir(self.path):
            return
        for name in os.listdir(self.path):
            ours = (*FILES, "meta.json", "progress.json", JOURNAL, LOCK)
            if SHARD.fullmatch(name) or name in ours or name.endswith(".tmp"):
                remove(self.file(name))
        _remove_empty([self.path])

    def adopt(self):
        """Move in what an interrupted run of an earlier version left: shards and progress.json in the folder itself."""
        old = os.path.join(self.folder, "progress.json")
        if not os.path.exists(old) or os.path.exists(os.path.join(self.folder, "meta.json")):
            return
        for name in os.listdir(self.folder):
            if SHARD.fullmatch(name):
                os.replace(os.path.join(self.folder, name), self.file(name))
        os.replace(old, self.file("progress.json"))
        self.__init__(self.folder)


@contextmanager
def open_staging(folder):
    """Make and lock the folder; yield its Staging. Refuse it while another process prepares a dataset there.

    After an error, a folder in which no shard was finished is removed again, with those above it that were made.
    """
    made, path = [], os.path.abspath(folder)
    while not os.path.exists(path):
        made.append(path)
        path = os.path.dirname(path)
    staging, begun = None, os.path.isdir(os.path.join(folder, UNFINISHED))
    try:
        os.makedirs(os.path.join(folder, UNFINISHED), exist_ok=True)
        with _locked(folder):
            staging = Staging(folder)
            staging.adopt()
            try:
                yield staging
            except BaseException:
                if not any(shard["tokens"] for shard in staging.shards.values()) and not staging.is_whole():
                    staging.clear()
                raise
    except BaseException:
        if staging is None and not begun:
            _remove_empty([os.path.join(folder, UNFINISHED)])
        _remove_empty(made)
        raise


def finish_interrupted(folder):
    """Move a dataset that was whole when its preparation was killed into its folder; delete what is of no use."""
    if os.path.isdir(os.path.join(folder, UNFINISHED)):
        with _locked(folder):
            staging = Staging(folder)
            if staging.is_whole():
                staging.finish()
            elif not staging.shards:
                staging.clear()


@contextmanager
def _locked(folder):
    """Lock unfinished/ in a folder for this process until the end of the `with` block, or of the process."""
    # NFS locks only what is open for writing: a file, which the folder itself cannot be.
    with open(os.path.join(folder, UNFINISHED, LOCK), "a") as lock:
        locked = True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            locked = False
        except OSError:  # a file system without locks
            pass
        if not locked or not os.fstat(lock.fileno()).st_nlink:  # deleted by another process that has just finished
            raise DataError(f"another process is preparing {folder}: wait for it, or give another --out")
        yield


def _link(source, target):
    """Give a file a second name, or copy it where the file system has no links."""
    source = os.path.realpath(source)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        flush_to_disk(target)


def _remove_empty(folders):
    """Remove those of the folders that are empty, in this order."""
    for path in folders:
        with suppress(OSError):
            os.rmdir(path)
