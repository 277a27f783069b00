"""Peer memory: a piece of each GPU's memory that the other processes of this host can read and write.

CUDA gives a handle for a piece of memory, 64 bytes that mean something in any process; who opens it gets an address,
and a kernel that loads from there reads the other GPU's memory over NVLink or PCIe. Torch's "symmetric memory" does the
same, but its exchange hung (torch 2.11) where a process made its second engine, with ranks that were new. So these are
the calls themselves.
"""

import ctypes
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

ENABLE_PEER_ACCESS = 1


class Handle(ctypes.Structure):
    _fields_ = [("content", ctypes.c_byte * 64)]


def find_runtime() -> ctypes.CDLL | None:
    """The CUDA runtime that torch has loaded, or None."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = [line.split()[-1] for line in lines if "libcudart" in line]
    return ctypes.CDLL(paths[0]) if paths else None


class Runtime:
    """Calls of the CUDA runtime on the current device of this thread. Raises RuntimeError where one fails."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.cudaIpcOpenMemHandle.argtypes = [ctypes.POINTER(ctypes.c_void_p), Handle, ctypes.c_uint]

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def allocate(self, num_bytes: int) -> int:
        """The address of so many bytes, all 0."""
        address, size = ctypes.c_void_p(), ctypes.c_size_t(num_bytes)
        self._call("cudaMalloc", ctypes.byref(address), size)
        self._call("cudaMemset", address, ctypes.c_int(0), size)
        self._call("cudaDeviceSynchronize")
        return address.value

    def handle_of(self, address: int) -> bytes:
        handle = Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return bytes(handle)

    def open(self, content: bytes) -> int:
        """The address here of what another process has allocated."""
        address = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), Handle.from_buffer_copy(content), ENABLE_PEER_ACCESS)
        return address.value

    def give_back(self, own: int, others: list[int]) -> None:
        """Nothing may run that uses them. Errors are not of interest any more."""
        for address in others:
            self._library.cudaIpcCloseMemHandle(ctypes.c_void_p(address))
        self._library.cudaFree(ctypes.c_void_p(own))


class PeerMemory:
    """So many bytes on each rank's GPU, 0 at first. addresses: where each rank's are, in this process. All ranks make
    it together, with a store that no other memory uses."""

    def __init__(self, num_bytes: int, rank: int, size: int, store: dist.Store):
        runtime = Runtime(find_runtime())
        own = runtime.allocate(num_bytes)
        store.set(f"memory {rank}", runtime.handle_of(own))
        self.addresses = [own if i == rank else runtime.open(store.get(f"memory {i}")) for i in range(size)]
        self._own, self._num_bytes = own, num_bytes
        others = [address for address in self.addresses if address != own]
        weakref.finalize(self, runtime.give_back, own, others).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict:
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self._own, False), "version": 3}

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """This rank's own bytes, uint8. Valid as long as this object."""
        return torch.as_tensor(self, device=device)
