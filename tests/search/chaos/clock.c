/* Add seconds to the time of day that this process sees: LD_PRELOAD, and HVDKIT_CHAOS_CLOCK, a file
 * with a double. The monotonic clocks stay the same, as after a change of a machine's clock.
 *
 * libfaketime 0.9.10 is of no use here: without a change of the monotonic clocks, its
 * clock_nanosleep fails, and with it time.sleep. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* Later times are times of day, earlier ones are those of a monotonic clock. */
#define FIRST_DAY 1000000000

static volatile const double *offset;
static __typeof__(&clock_gettime) real_clock_gettime;

__attribute__((constructor)) static void start(void) {
  real_clock_gettime = REAL(clock_gettime);
  const char *path = getenv("HVDKIT_CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *memory = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED) offset = memory;
  close(file);
}

static time_t seconds(void) { return offset ? (time_t)*offset : 0; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (!real_clock_gettime) real_clock_gettime = REAL(clock_gettime);
  int status = real_clock_gettime(clock, now);
  if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += seconds();
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec exact;
  int status = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return status;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}

/* The kernel compares a deadline with the machine's clock. */
static struct timespec on_this_machine(const struct timespec *until) {
  struct timespec moved = *until;
  if (moved.tv_sec > FIRST_DAY) moved.tv_sec -= seconds();
  return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
  static __typeof__(&pthread_cond_timedwait) real;
  if (!real) real = REAL(pthread_cond_timedwait);
  struct timespec moved = on_this_machine(until);
  return real(condition, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
  static __typeof__(&sem_timedwait) real;
  if (!real) real = REAL(sem_timedwait);
  struct timespec moved = on_this_machine(until);
  return real(semaphore, &moved);
}
