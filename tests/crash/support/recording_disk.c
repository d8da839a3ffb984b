/* Records, in one total order, all that a process does to the files under one directory.

   Preloaded into a test's child process (LD_PRELOAD). RECORD_ROOT is the directory (an absolute path without links),
   RECORD_LOG the file that records are appended to, RECORD_REPORTS a file whose writes are the process's own words and
   are recorded as such. A change is made and recorded under one lock, so the log's order is the order in which the
   kernel saw them; only a flush is recorded twice, at its begin and at its end, since others go on meanwhile.
   disk_log.py knows the layout of `struct record`. Needs a 64-bit Linux. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE, WRITE, ALLOCATE, RENAME, UNLINK, MKDIR, FLUSH_BEGIN, FLUSH_END, REPORT, UNKNOWN };

struct record {
    uint32_t kind;
    uint32_t zeros; /* the data is `length` zeros, and left out */
    uint64_t inode;
    int64_t offset;
    int64_t length;
    int64_t ticket; /* of a flush, the same at begin and end */
    int64_t result; /* 0, or the error number of a flush */
    uint32_t name_bytes;
    uint32_t data_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_descriptor = -1;
static int64_t tickets;

static void give_up(const char *why) {
    fprintf(stderr, "recording_disk: %s: %s\n", why, strerror(errno));
    _exit(97);
}

static void put(const void *data, size_t nbytes) {
    const char *at = data;
    while (nbytes > 0) {
        const ssize_t done = syscall(SYS_write, log_descriptor, at, nbytes);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) give_up("writing the log");
        at += done;
        nbytes -= (size_t)done;
    }
}

/* Called with the lock held. */
static void append(struct record record, const char *name, const void *data) {
    const int before = errno;
    if (log_descriptor < 0) {
        const char *path = getenv("RECORD_LOG");
        if (path == NULL) give_up("RECORD_LOG is not set");
        log_descriptor = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log_descriptor < 0) give_up("opening the log");
    }
    record.name_bytes = name == NULL ? 0 : (uint32_t)strlen(name);
    record.data_bytes = data == NULL ? 0 : (uint32_t)record.length;
    put(&record, sizeof record);
    if (name != NULL) put(name, record.name_bytes);
    if (data != NULL) put(data, record.data_bytes);
    errno = before;
}

/* The absolute form of a path, or 0 if it is not under the root. */
static int ours(int directory, const char *path, char *full) {
    const char *root = getenv("RECORD_ROOT");
    if (root == NULL || path == NULL) return 0;
    const int before = errno;
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
    } else {
        char where[PATH_MAX] = "";
        if (directory == AT_FDCWD) {
            if (getcwd(where, sizeof where) == NULL) where[0] = 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            const ssize_t length = readlink(link, where, sizeof where - 1);
            where[length < 0 ? 0 : length] = 0;
        }
        if (snprintf(full, PATH_MAX, "%s/%s", where, path) >= PATH_MAX) full[0] = 0;
    }
    errno = before;
    const size_t length = strlen(root);
    return strncmp(full, root, length) == 0 && full[length] == '/';
}

/* What a descriptor is open on: 1 a file or directory under the root (or the root), 2 the file of reports, 0 other. */
static int which(int descriptor, struct stat *status) {
    const int before = errno;
    char link[64], path[PATH_MAX];
    const char *root = getenv("RECORD_ROOT"), *reports = getenv("RECORD_REPORTS");
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    int found = 0;
    if (length > 0 && root != NULL) {
        path[length] = 0;
        const size_t root_bytes = strlen(root);
        if (reports != NULL && strcmp(path, reports) == 0)
            found = 2;
        else if (strncmp(path, root, root_bytes) == 0 && (path[root_bytes] == '/' || path[root_bytes] == 0))
            found = 1;
    }
    if (found && fstat(descriptor, status) != 0) found = 0;
    errno = before;
    return found;
}

static int all_zero(const char *data, size_t nbytes) {
    return nbytes == 0 || (data[0] == 0 && memcmp(data, data + 1, nbytes - 1) == 0);
}

static void unknown(const char *call) {
    pthread_mutex_lock(&lock);
    append((struct record){.kind = UNKNOWN}, call, NULL);
    pthread_mutex_unlock(&lock);
}

/* -- names --------------------------------------------------------------------------------------------------------- */

static int do_open(int directory, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    if (!(flags & (O_CREAT | O_TRUNC)) || !ours(directory, path, full))
        return (int)syscall(SYS_openat, directory, path, flags, mode);
    if ((flags & O_TMPFILE) == O_TMPFILE) unknown("open(O_TMPFILE)");
    pthread_mutex_lock(&lock);
    struct stat status;
    const int before = errno;
    const int existed = fstatat(directory, path, &status, 0) == 0;
    errno = before;
    const int descriptor = (int)syscall(SYS_openat, directory, path, flags, mode);
    const int failed = errno;
    /* Some file systems make the file before they refuse a flag. */
    if (fstatat(directory, path, &status, 0) == 0) {
        if (!existed)
            append((struct record){.kind = CREATE, .inode = status.st_ino}, full, NULL);
        else if (descriptor >= 0 && (flags & O_TRUNC))
            append((struct record){.kind = TRUNCATE, .inode = status.st_ino}, full, NULL);
    }
    errno = failed;
    pthread_mutex_unlock(&lock);
    return descriptor;
}

#define MODE_ARGUMENT(mode, flags)                        \
    mode_t mode = 0;                                      \
    if ((flags) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list rest;                                     \
        va_start(rest, flags);                            \
        mode = va_arg(rest, mode_t);                      \
        va_end(rest);                                     \
    }

int open(const char *path, int flags, ...) {
    MODE_ARGUMENT(mode, flags)
    return do_open(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE_ARGUMENT(mode, flags)
    return do_open(AT_FDCWD, path, flags, mode);
}
int openat(int directory, const char *path, int flags, ...) {
    MODE_ARGUMENT(mode, flags)
    return do_open(directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    MODE_ARGUMENT(mode, flags)
    return do_open(directory, path, flags, mode);
}
int creat(const char *path, mode_t mode) { return do_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

int mkdirat(int directory, const char *path, mode_t mode) {
    char full[PATH_MAX];
    if (!ours(directory, path, full)) return (int)syscall(SYS_mkdirat, directory, path, mode);
    pthread_mutex_lock(&lock);
    struct stat status;
    const int result = (int)syscall(SYS_mkdirat, directory, path, mode);
    if (result == 0 && fstatat(directory, path, &status, 0) == 0)
        append((struct record){.kind = MKDIR, .inode = status.st_ino}, full, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static int do_rename(int from, const char *old, int to, const char *new, unsigned flags) {
    char full_old[PATH_MAX], full_new[PATH_MAX];
    const int is_old = ours(from, old, full_old), is_new = ours(to, new, full_new);
    if (!is_old && !is_new) return (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (!is_old || !is_new || flags != 0) unknown("rename across the border, or with flags");
    pthread_mutex_lock(&lock);
    const int result = (int)syscall(SYS_renameat2, from, old, to, new, flags);
    if (result == 0)
        append((struct record){.kind = RENAME, .length = (int64_t)strlen(full_new)}, full_old, full_new);
    pthread_mutex_unlock(&lock);
    return result;
}
int rename(const char *old, const char *new) { return do_rename(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return do_rename(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return do_rename(from, old, to, new, flags);
}

int unlinkat(int directory, const char *path, int flags) {
    char full[PATH_MAX];
    if (!ours(directory, path, full)) return (int)syscall(SYS_unlinkat, directory, path, flags);
    pthread_mutex_lock(&lock);
    const int result = (int)syscall(SYS_unlinkat, directory, path, flags);
    if (result == 0) append((struct record){.kind = UNLINK}, full, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

/* -- content ------------------------------------------------------------------------------------------------------- */

static ssize_t do_write(int descriptor, const void *data, size_t nbytes, off_t offset, int positional) {
    struct stat status;
    const int kind = which(descriptor, &status);
    if (kind == 0)
        return positional ? syscall(SYS_pwrite64, descriptor, data, nbytes, offset)
                          : syscall(SYS_write, descriptor, data, nbytes);
    pthread_mutex_lock(&lock);
    if (!positional) {
        const int flags = fcntl(descriptor, F_GETFL);
        if (flags & O_APPEND) fstat(descriptor, &status);
        offset = flags & O_APPEND ? status.st_size : lseek(descriptor, 0, SEEK_CUR);
    }
    const ssize_t done = positional ? syscall(SYS_pwrite64, descriptor, data, nbytes, offset)
                                    : syscall(SYS_write, descriptor, data, nbytes);
    if (done > 0) {
        const int zeros = kind == 1 && all_zero(data, (size_t)done);
        append((struct record){.kind = kind == 1 ? WRITE : REPORT,
                               .zeros = (uint32_t)zeros,
                               .inode = status.st_ino,
                               .offset = offset,
                               .length = done},
               NULL, zeros ? NULL : data);
    }
    pthread_mutex_unlock(&lock);
    return done;
}
ssize_t write(int descriptor, const void *data, size_t nbytes) { return do_write(descriptor, data, nbytes, 0, 0); }
ssize_t pwrite(int descriptor, const void *data, size_t nbytes, off_t offset) {
    return do_write(descriptor, data, nbytes, offset, 1);
}
ssize_t pwrite64(int descriptor, const void *data, size_t nbytes, off_t offset) {
    return do_write(descriptor, data, nbytes, offset, 1);
}

static int do_allocate(int descriptor, int mode, off_t offset, off_t length) {
    struct stat status;
    if (which(descriptor, &status) != 1) return (int)syscall(SYS_fallocate, descriptor, mode, offset, length);
    if (mode != 0) unknown("fallocate with a mode");
    pthread_mutex_lock(&lock);
    const int result = (int)syscall(SYS_fallocate, descriptor, mode, offset, length);
    if (result == 0)
        append((struct record){.kind = ALLOCATE, .inode = status.st_ino, .offset = offset, .length = length}, NULL, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
    return do_allocate(descriptor, mode, offset, length);
}
int fallocate64(int descriptor, int mode, off_t offset, off_t length) {
    return do_allocate(descriptor, mode, offset, length);
}
int posix_fallocate(int descriptor, off_t offset, off_t length) {
    const int before = errno;
    const int failed = do_allocate(descriptor, 0, offset, length) == 0 ? 0 : errno;
    errno = before;
    return failed;
}
int posix_fallocate64(int descriptor, off_t offset, off_t length) { return posix_fallocate(descriptor, offset, length); }

int ftruncate(int descriptor, off_t length) {
    struct stat status;
    if (which(descriptor, &status) != 1) return (int)syscall(SYS_ftruncate, descriptor, length);
    pthread_mutex_lock(&lock);
    const int result = (int)syscall(SYS_ftruncate, descriptor, length);
    if (result == 0)
        append((struct record){.kind = TRUNCATE, .inode = status.st_ino, .offset = length}, NULL, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int ftruncate64(int descriptor, off_t length) { return ftruncate(descriptor, length); }

/* -- flushes ------------------------------------------------------------------------------------------------------- */

static int do_flush(long call, int descriptor) {
    struct stat status;
    if (which(descriptor, &status) != 1) return (int)syscall(call, descriptor);
    pthread_mutex_lock(&lock);
    const int64_t ticket = ++tickets;
    append((struct record){.kind = FLUSH_BEGIN, .inode = status.st_ino, .ticket = ticket}, NULL, NULL);
    pthread_mutex_unlock(&lock);
    const int result = (int)syscall(call, descriptor);
    pthread_mutex_lock(&lock);
    append((struct record){.kind = FLUSH_END, .inode = status.st_ino, .ticket = ticket, .result = result ? errno : 0},
           NULL, NULL);
    pthread_mutex_unlock(&lock);
    return result;
}
int fsync(int descriptor) { return do_flush(SYS_fsync, descriptor); }
int fdatasync(int descriptor) { return do_flush(SYS_fdatasync, descriptor); }

/* -- ways to change a file that the model does not know: seen, and refused by the test ------------------------------- */

static void unknown_if_ours(int descriptor, const char *call) {
    struct stat status;
    if (which(descriptor, &status) == 1) unknown(call);
}
ssize_t writev(int descriptor, const struct iovec *pieces, int count) {
    unknown_if_ours(descriptor, "writev");
    return syscall(SYS_writev, descriptor, pieces, count);
}
ssize_t pwritev(int descriptor, const struct iovec *pieces, int count, off_t offset) {
    unknown_if_ours(descriptor, "pwritev");
    return syscall(SYS_pwritev, descriptor, pieces, count, offset, 0L);
}
ssize_t pwritev64(int descriptor, const struct iovec *pieces, int count, off_t offset) {
    return pwritev(descriptor, pieces, count, offset);
}
ssize_t pwritev2(int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    unknown_if_ours(descriptor, "pwritev2");
    return syscall(SYS_pwritev2, descriptor, pieces, count, offset, 0L, flags);
}
ssize_t pwritev64v2(int descriptor, const struct iovec *pieces, int count, off_t offset, int flags) {
    return pwritev2(descriptor, pieces, count, offset, flags);
}
ssize_t copy_file_range(int from, off_t *from_at, int to, off_t *to_at, size_t nbytes, unsigned flags) {
    unknown_if_ours(to, "copy_file_range");
    return syscall(SYS_copy_file_range, from, from_at, to, to_at, nbytes, flags);
}
ssize_t sendfile64(int to, int from, off_t *offset, size_t nbytes) {
    unknown_if_ours(to, "sendfile");
    return syscall(SYS_sendfile, to, from, offset, nbytes);
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    char full[PATH_MAX];
    if (ours(to, new, full)) unknown("link");
    return (int)syscall(SYS_linkat, from, old, to, new, flags);
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
