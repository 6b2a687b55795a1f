// Kills the process immediately before it changes a file of a folder for the Nth time.
//
// scripts/soak_operations.py loads this library through LD_PRELOAD, and calls kill_at_arm. It wraps
// the functions of the C library with which Python and TensorFlow change files. A kill before a
// write, an fsync or an fclose leaves an incomplete file, as a real kill would.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static atomic_long count;
static long kill_at;

void kill_at_arm(const char *path, long number) {
  strncpy(folder, path, sizeof folder - 1);
  kill_at = number;
  atomic_store(&count, 0);
}

long kill_at_count(void) { return atomic_load(&count); }

static void before(const char *path) {
  if (!folder[0] || !path || !strstr(path, folder)) return;
  if (atomic_fetch_add(&count, 1) + 1 != kill_at) return;
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static void before_file(int file) {
  char name[64], path[4096];
  ssize_t length;
  if (!folder[0]) return;
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  length = readlink(name, path, sizeof path - 1);
  if (length <= 0) return;
  path[length] = 0;
  before(path);
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define CHANGES(flags) ((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC))

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    if (CHANGES(flags)) before(path); \
    return real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    REAL(name); \
    va_list arguments; \
    va_start(arguments, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
    va_end(arguments); \
    if (CHANGES(flags)) before(path); \
    return real(at, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    if (strpbrk(mode, "wa+")) before(path); \
    return real(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

#define ON_PATH(name, parameters, path, arguments) \
  int name parameters { \
    REAL(name); \
    before(path); \
    return real arguments; \
  }
ON_PATH(rename, (const char *from, const char *to), to, (from, to))
ON_PATH(renameat, (int a, const char *from, int b, const char *to), to, (a, from, b, to))
ON_PATH(link, (const char *from, const char *to), to, (from, to))
ON_PATH(linkat, (int a, const char *from, int b, const char *to, int flags), to, (a, from, b, to, flags))
ON_PATH(unlink, (const char *path), path, (path))
ON_PATH(unlinkat, (int at, const char *path, int flags), path, (at, path, flags))
ON_PATH(rmdir, (const char *path), path, (path))
ON_PATH(mkdir, (const char *path, mode_t mode), path, (path, mode))
ON_PATH(mkdirat, (int at, const char *path, mode_t mode), path, (at, path, mode))
ON_PATH(truncate, (const char *path, off_t length), path, (path, length))

#define ON_FILE(type, name, parameters, file, arguments) \
  type name parameters { \
    REAL(name); \
    before_file(file); \
    return real arguments; \
  }
ON_FILE(int, fsync, (int file), file, (file))
ON_FILE(int, fdatasync, (int file), file, (file))
ON_FILE(int, ftruncate, (int file, off_t length), file, (file, length))
ON_FILE(int, fclose, (FILE *stream), fileno(stream), (stream))
ON_FILE(ssize_t, write, (int file, const void *from, size_t size), file, (file, from, size))
ON_FILE(ssize_t, sendfile, (int out, int in, off_t *from, size_t size), out, (out, in, from, size))
