// A slot file mapped into memory: the second way to write one, for persistent memory (DAX file systems).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "storage/os_io.hpp"

namespace lastgood {

class PersistentMapping {
  public:
    // Maps the first `nbytes` of an open file, which must be that long and written in full: a store into a hole of a
    // full file system would end the process. Throws OsError.
    PersistentMapping(int fd, std::uint64_t nbytes);
    ~PersistentMapping();
    PersistentMapping(const PersistentMapping&) = delete;
    PersistentMapping& operator=(const PersistentMapping&) = delete;

    // Stores bytes; several threads may, in ranges of their own. Durable after the next flush(), and not before by any
    // promise. Returns early, false, once `stop` is set.
    bool write(const void* data, std::uint64_t nbytes, std::uint64_t offset, const std::atomic<bool>& stop);

    // Makes all stores that have returned durable. Throws OsError.
    void flush();

    // "libpmem": stores past the CPU's caches, made durable by fences alone. "msync": by the kernel, page by page.
    const char* how() const { return copy_persist_ != nullptr ? "libpmem" : "msync"; }

    std::uint64_t nbytes() const { return nbytes_; }

  private:
    using CopyPersist = void* (*)(void*, const void*, std::size_t);

    std::byte* data_ = nullptr;
    std::uint64_t nbytes_;
    CopyPersist copy_persist_ = nullptr;
};

}  // namespace lastgood
