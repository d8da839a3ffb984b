#include "storage/persistent_memory.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace lastgood {
namespace {

constexpr std::uint64_t kStep = 4 << 20;  // between two steps an abort is seen

// What is used of libpmem, found at run time: most machines have neither it nor such memory.
struct Libpmem {
    void* (*copy_persist)(void*, const void*, std::size_t) = nullptr;
    int (*is_pmem)(const void*, std::size_t) = nullptr;

    Libpmem() {
        void* library = dlopen("libpmem.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) return;
        copy_persist = reinterpret_cast<decltype(copy_persist)>(dlsym(library, "pmem_memcpy_persist"));
        is_pmem = reinterpret_cast<decltype(is_pmem)>(dlsym(library, "pmem_is_pmem"));
        if (copy_persist == nullptr || is_pmem == nullptr) copy_persist = nullptr;
    }
};

const Libpmem& libpmem() {
    static const Libpmem library;
    return library;
}

}  // namespace

PersistentMapping::PersistentMapping(int fd, std::uint64_t nbytes) : nbytes_(nbytes) {
    struct stat status;
    if (fstat(fd, &status) != 0) throw OsError(errno, "fstat", 0, 0);
    if (nbytes == 0 || std::uint64_t(status.st_size) < nbytes)
        throw std::invalid_argument("PersistentMapping: the file is shorter than what is to be mapped");
    void* mapped = MAP_FAILED;
    bool synchronous = false;
#if defined(MAP_SHARED_VALIDATE) && defined(MAP_SYNC)
    // Only file systems that give direct access to persistent memory accept this.
    mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    synchronous = mapped != MAP_FAILED;
#endif
    if (mapped == MAP_FAILED) mapped = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) throw OsError(errno, "mmap", 0, nbytes);
    data_ = static_cast<std::byte*>(mapped);
    const Libpmem& library = libpmem();
    // libpmem itself says yes to any memory where PMEM_IS_PMEM_FORCE=1 is set, for trying it out without the hardware.
    if (library.copy_persist != nullptr && (synchronous || library.is_pmem(data_, nbytes) == 1))
        copy_persist_ = library.copy_persist;
}

PersistentMapping::~PersistentMapping() { munmap(data_, nbytes_); }

bool PersistentMapping::write(const void* data, std::uint64_t nbytes, std::uint64_t offset,
                              const std::atomic<bool>& stop) {
    if (offset > nbytes_ || nbytes > nbytes_ - offset)
        throw std::invalid_argument("PersistentMapping: a write outside of the mapping");
    const auto* from = static_cast<const std::byte*>(data);
    for (std::uint64_t done = 0; done < nbytes;) {
        if (stop.load()) return false;
        const std::uint64_t step = std::min(kStep, nbytes - done);
        // A fence orders only the stores of its own thread, so each thread makes its own durable.
        if (copy_persist_ != nullptr)
            copy_persist_(data_ + offset + done, from + done, step);
        else
            std::memcpy(data_ + offset + done, from + done, step);
        done += step;
    }
    return true;
}

void PersistentMapping::flush() {
    if (copy_persist_ != nullptr) return;
    if (msync(data_, nbytes_, MS_SYNC) != 0) throw OsError(errno, "msync", 0, nbytes_);
}

}  // namespace lastgood
