/* Makes chosen calls of a process fail, once or a few times, as a bad disk would; everything else passes.

   Preloaded into a test's child process (LD_PRELOAD), which arms one fault at a time through fault_arm() (found with
   ctypes in the process itself), so that it strikes in a known moment of a run; FAULT_CALL, FAULT_NAME, FAULT_SKIP,
   FAULT_TIMES, FAULT_ERROR in the environment arm one from the start. Needs a 64-bit Linux. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PASS = 0, SHORT = -1, HANG = -2 }; /* instead of an error number */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    char call[16];       /* write, read, flush or allocate */
    char name[PATH_MAX]; /* part of the file's path */
    char release[PATH_MAX];
    long skip;
    long times;
    int effect;
    long hits;
} fault;

/* The next `skip` matching calls pass, the `times` after them meet `effect`: an error number, -1 for a transfer of half
   the bytes, -2 for waiting (up to a minute) until the file `release` is there. */
void fault_arm(const char *call, const char *name, long skip, long times, int effect, const char *release) {
    pthread_mutex_lock(&lock);
    snprintf(fault.call, sizeof fault.call, "%s", call);
    snprintf(fault.name, sizeof fault.name, "%s", name);
    snprintf(fault.release, sizeof fault.release, "%s", release);
    fault.skip = skip;
    fault.times = times;
    fault.effect = effect;
    fault.hits = 0;
    pthread_mutex_unlock(&lock);
}

/* Calls that met the fault since it was armed. */
long fault_hits(void) {
    pthread_mutex_lock(&lock);
    const long hits = fault.hits;
    pthread_mutex_unlock(&lock);
    return hits;
}

__attribute__((constructor)) static void arm_from_environment(void) {
    const char *call = getenv("FAULT_CALL"), *name = getenv("FAULT_NAME"), *skip = getenv("FAULT_SKIP");
    const char *times = getenv("FAULT_TIMES"), *error = getenv("FAULT_ERROR");
    if (call != NULL && name != NULL)
        fault_arm(call, name, skip ? atol(skip) : 0, times ? atol(times) : 1, error ? atoi(error) : EIO, "");
}

/* `descriptor` names the file, or `known_path` where it is not NULL. */
static int strike_file(const char *call, int descriptor, const char *known_path) {
    const int before = errno;
    pthread_mutex_lock(&lock);
    int effect = PASS;
    char release[PATH_MAX] = "";
    if (fault.times > 0 && strcmp(call, fault.call) == 0) {
        char link[64], path[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
        const ssize_t length = known_path == NULL ? readlink(link, path, sizeof path - 1) : 0;
        path[length < 0 ? 0 : length] = 0;
        if (known_path != NULL) snprintf(path, sizeof path, "%s", known_path);
        if (strstr(path, fault.name) != NULL) {
            if (fault.skip > 0) {
                --fault.skip;
            } else {
                --fault.times;
                ++fault.hits;
                effect = fault.effect;
                memcpy(release, fault.release, sizeof release);
            }
        }
    }
    pthread_mutex_unlock(&lock);
    if (effect == HANG) {
        const struct timespec pause = {0, 10 * 1000 * 1000};
        for (int turn = 0; turn < 6000 && access(release, F_OK) != 0; ++turn) nanosleep(&pause, NULL);
        effect = PASS;
    }
    errno = effect > 0 ? effect : before;
    return effect;
}

static int strike(const char *call, int descriptor) { return strike_file(call, descriptor, NULL); }

/* Half of a transfer, in whole blocks where there are two. */
static size_t half(size_t nbytes) { return nbytes >= 8192 ? nbytes / 2 / 4096 * 4096 : nbytes / 2; }

static ssize_t do_write(long call, int descriptor, const void *data, size_t nbytes, off_t offset) {
    const int effect = strike("write", descriptor);
    if (effect > 0) return -1;
    return syscall(call, descriptor, data, effect == SHORT ? half(nbytes) : nbytes, offset);
}
ssize_t write(int descriptor, const void *data, size_t nbytes) {
    return do_write(SYS_write, descriptor, data, nbytes, 0);
}
ssize_t pwrite(int descriptor, const void *data, size_t nbytes, off_t offset) {
    return do_write(SYS_pwrite64, descriptor, data, nbytes, offset);
}
ssize_t pwrite64(int descriptor, const void *data, size_t nbytes, off_t offset) {
    return do_write(SYS_pwrite64, descriptor, data, nbytes, offset);
}

ssize_t pread(int descriptor, void *data, size_t nbytes, off_t offset) {
    const int effect = strike("read", descriptor);
    if (effect > 0) return -1;
    return syscall(SYS_pread64, descriptor, data, effect == SHORT ? half(nbytes) : nbytes, offset);
}
ssize_t pread64(int descriptor, void *data, size_t nbytes, off_t offset) {
    return pread(descriptor, data, nbytes, offset);
}

/* Python's way to read into a buffer: one piece. A process that gives several gets them in one short read. */
ssize_t preadv2(int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    const int effect = strike("read", descriptor);
    if (effect > 0) return -1;
    struct iovec first = pieces[0];
    if (effect == SHORT) {
        first.iov_len = half(first.iov_len);
        return syscall(SYS_preadv2, descriptor, &first, 1L, offset, 0L, flags);
    }
    return syscall(SYS_preadv2, descriptor, pieces, (long)count, offset, 0L, flags);
}
ssize_t preadv64v2(int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    return preadv2(descriptor, pieces, count, offset, flags);
}
ssize_t preadv(int descriptor, const struct iovec *pieces, int count, off_t offset) {
    return preadv2(descriptor, pieces, count, offset, 0);
}
ssize_t preadv64(int descriptor, const struct iovec *pieces, int count, off_t offset) {
    return preadv2(descriptor, pieces, count, offset, 0);
}

static int do_flush(long call, int descriptor) {
    if (strike("flush", descriptor) > 0) return -1;
    return (int)syscall(call, descriptor);
}
int fsync(int descriptor) { return do_flush(SYS_fsync, descriptor); }
int fdatasync(int descriptor) { return do_flush(SYS_fdatasync, descriptor); }

/* The file that is mapped at an address, from /proc/self/maps; empty where there is none. */
static void mapped_file(const void *address, char *path, size_t room) {
    path[0] = 0;
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[PATH_MAX + 128];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        unsigned long begin, end;
        if (sscanf(line, "%lx-%lx", &begin, &end) != 2) continue;
        if ((unsigned long)address < begin || (unsigned long)address >= end) continue;
        const char *name = strchr(line, '/');
        snprintf(path, room, "%s", name == NULL ? "" : name);
        break;
    }
    if (maps != NULL) fclose(maps);
}

int msync(void *address, size_t nbytes, int flags) {
    char path[PATH_MAX];
    mapped_file(address, path, sizeof path);
    if (strike_file("flush", -1, path) > 0) return -1;
    return (int)syscall(SYS_msync, address, nbytes, (long)flags);
}

int posix_fallocate(int descriptor, off_t offset, off_t length) {
    const int before = errno;
    int failed = strike("allocate", descriptor);
    if (failed <= 0) failed = syscall(SYS_fallocate, descriptor, 0, offset, length) == 0 ? 0 : errno;
    errno = before;
    return failed;
}
int posix_fallocate64(int descriptor, off_t offset, off_t length) { return posix_fallocate(descriptor, offset, length); }
