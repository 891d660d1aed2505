// Python's state of a thread that Horovod starts. Part of hvdkit (Apache-2.0).

#ifndef HVDKIT_PYTHON_THREAD_H
#define HVDKIT_PYTHON_THREAD_H

#include <dlfcn.h>

namespace hvdkit {

// Gives the calling thread a Python thread state for as long as it runs, without Python's lock (GIL).
// Does nothing if no Python interpreter is running. Waits for the GIL.
//
// PyTorch takes the GIL to free a tensor, which Horovod's thread does after each collective. A thread
// without a state creates one each time, under a lock of Python's but without the GIL. If another
// thread calls fork() at that moment, the lock stays locked in the new process, which then hangs
// before it runs any Python: https://github.com/python/cpython/issues/112275.
inline void keep_python_thread_state() {
  // This library is not linked with Python.
  auto initialized = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "Py_IsInitialized"));
  auto ensure = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Ensure"));
  auto save = reinterpret_cast<void* (*)()>(dlsym(RTLD_DEFAULT, "PyEval_SaveThread"));
  if (initialized && ensure && save && initialized()) {
    ensure();
    save();
  }
}

} // namespace hvdkit

#endif // HVDKIT_PYTHON_THREAD_H
