"""Memory for audits on the simulated driver: an allocator like torch's, which hands out pieces of segments that the driver gave
it, keeps what is freed, and gives it to the next that asks; and arrays that own such pieces."""

from arena.memory import Block, Event, now


class Array:
    """Owns a piece until `free()`."""

    def __init__(self, allocator, address, size):
        self.allocator, self.address, self.size = allocator, address, size

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "version": 3}

    def free(self):
        self.allocator.free(self.address)


class Allocator:
    """What `arena.memory.Allocator` asks for. `watched=False`: one that keeps no history."""

    PIECE = 512

    def __init__(self, cuda, watched=True):
        self.cuda, self.watched, self.pieces, self.history, self.frees, self.clock = cuda, watched, {}, [], 0, 0

    def array(self, size, pool=(0, 0)):
        """The lowest free piece of that size and pool, or a new segment."""
        size = -(-size // self.PIECE) * self.PIECE
        free = [at for at, block in self.pieces.items() if not block.used and (block.size, block.pool) == (size, pool)]
        address = min(free) if free else self.cuda.plant(size)
        self.pieces[address] = Block(address, size, True, pool, address, size)
        self.note("alloc", address, size)
        return Array(self, address, size)

    def free(self, address):
        self.pieces[address] = self.pieces[address]._replace(used=False)
        self.frees += 1
        self.note("free", address, self.pieces[address].size)

    def empty_cache(self):
        for address, block in list(self.pieces.items()):
            if not block.used:
                del self.pieces[address]
                self.cuda.unplant(address)
                self.note("unmap", address, block.size)

    def note(self, action, address, size):
        if self.watched:
            self.clock = max(self.clock + 1, now())  # no two at once, as tests are faster than a microsecond
            self.history.append(Event(action, address, size, self.clock))

    # ---- the protocol ----

    def blocks(self):
        return list(self.pieces.values())

    def freed(self):
        return self.frees

    def watch(self):
        return

    def events(self, since):
        return [each for each in self.history if each.when >= since], self.watched
