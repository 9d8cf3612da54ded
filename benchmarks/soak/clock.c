/* Moves the wall clock of a process by the seconds in a shared file (EDL_SOAK_CLOCK), as an administrator or NTP would
 * move the machine's. Clocks that only go forward stay as they are. For LD_PRELOAD; glibc on Linux.
 *
 * Deadlines by the wall clock are moved back before the kernel sees them. They are known by their size: a monotonic
 * clock counts from the start of the machine. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LEAST_WALL_S 500000000

static const volatile int64_t *shared;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("EDL_SOAK_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (found != MAP_FAILED) shared = found;
}

static int64_t moved_s(void) { return shared ? *shared : 0; }

static void *next(const char *name) {
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2"); /* on x86-64 the condition variables have an older version */
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))next(#name)

static struct timespec unmoved(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (found.tv_sec > LEAST_WALL_S) found.tv_sec -= moved_s();
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += moved_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    NEXT(gettimeofday);
    int failed = real(now, zone);
    if (!failed && now) now->tv_sec += moved_s();
    return failed;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    NEXT(pthread_cond_timedwait);
    struct timespec until = unmoved(deadline);
    return real(cond, mutex, &until);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    NEXT(pthread_mutex_timedlock);
    struct timespec until = unmoved(deadline);
    return real(mutex, &until);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    NEXT(sem_timedwait);
    struct timespec until = unmoved(deadline);
    return real(semaphore, &until);
}
