"""Exchange between ranks through a store: every rank gets every value, with a linear number of reads."""

from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from bert.core.dist import DistConfig
from certify.store_group import StoreGroup


class Counted:
    """A store that counts reads of keys."""

    def __init__(self):
        self.store, self.reads = HashStore(), 0

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        self.reads += 1
        return self.store.get(key)

    def multi_get(self, keys):
        self.reads += len(keys)
        return self.store.multi_get(keys)


def test_the_number_of_reads_is_proportional_to_the_number_of_ranks():
    size, store = 12, Counted()

    def rank(number):
        place = DistConfig(world_size=size, rank=number, local_rank=number % 4)
        peers = StoreGroup(place, store, f"node{number // 4}")
        for _ in range(5):
            peers.barrier()
        largest, everyone = peers.max(float(number)), peers.exchange(str(number))
        return peers.nodes, peers.members(1), largest, everyone

    with ThreadPoolExecutor(size) as pool:
        answers = list(pool.map(rank, range(size)))
    everyone = [str(number) for number in range(size)]
    nodes = ["node0", "node1", "node2"]
    assert answers == [(nodes, [4, 5, 6, 7], 11.0, everyone)] * size
    # A barrier is one read a rank, an exchange two.
    assert store.reads == 5 * size + 3 * 2 * size
    assert store.num_keys() <= 2 * size
