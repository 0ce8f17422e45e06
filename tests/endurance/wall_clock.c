/* Preloaded into a process, moves its wall clock by what stands in a file, at once and as a whole.
 *
 * WALL_CLOCK_OFFSET names a file of eight bytes: nanoseconds to add, as int64. It is mapped, so a
 * write to it is a jump. Covered: whoever asks libc for the time, and waits of condition variables,
 * semaphores and futexes until a time of that clock, which end early when it jumps past it.
 * Monotonic clocks are left alone, as by a real jump. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
#define LOOK (SECOND / 50) /* how often a wait sees whether the clock has jumped */

static int64_t nothing;
static volatile int64_t *offset = &nothing;
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void start(void) {
    real_cond = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    real_syscall = dlsym(RTLD_NEXT, "syscall");
    const char *path = getenv("WALL_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    close(file);
}

static int64_t count(struct timespec at) { return at.tv_sec * SECOND + at.tv_nsec; }

static struct timespec spec(int64_t ns) {
    return (struct timespec){.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
}

static int64_t true_now(void) {
    struct timespec now;
    real_syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
    return count(now);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long result = real_syscall ? real_syscall(SYS_clock_gettime, clock, now)
                               : syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = spec(count(*now) + *offset);
    return (int)result;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    *now = (struct timeval){.tv_sec = at.tv_sec, .tv_usec = at.tv_nsec / 1000};
    return 0;
}

time_t time(time_t *out) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (out) *out = at.tv_sec;
    return at.tv_sec;
}

/* A time of the monotonic clocks is small: it counts from the start of the machine. */
static int is_wall(const struct timespec *until) { return until && until->tv_sec > 1000000000; }

/* The next time, of the true clock, to look whether `until` of the moved one is over. */
static struct timespec soon(const struct timespec *until, int *is_last) {
    int64_t end = count(*until) - *offset, look = true_now() + LOOK;
    *is_last = end <= look;
    return spec(*is_last ? end : look);
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
    if (!is_wall(until)) return real_cond(c, m, until);
    for (int is_last = 0;;) {
        struct timespec at = soon(until, &is_last);
        int result = real_cond(c, m, &at);
        if (result != ETIMEDOUT || is_last) return result;
    }
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
    if (!is_wall(until)) return real_sem(s, until);
    for (int is_last = 0;;) {
        struct timespec at = soon(until, &is_last);
        int result = real_sem(s, &at);
        if (result == 0 || errno != ETIMEDOUT || is_last) return result;
    }
}

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    long a[6];
    for (int n = 0; n < 6; n++) a[n] = va_arg(list, long);
    va_end(list);
    if (!real_syscall) real_syscall = dlsym(RTLD_NEXT, "syscall");
    const struct timespec *until = (const struct timespec *)a[3];
    int is_wait = number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET &&
                  (a[1] & FUTEX_CLOCK_REALTIME) && is_wall(until);
    if (!is_wait) return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    for (int is_last = 0;;) {
        struct timespec at = soon(until, &is_last);
        long result = real_syscall(number, a[0], a[1], a[2], (long)&at, a[4], a[5]);
        if (result == 0 || errno != ETIMEDOUT || is_last) return result;
    }
}
