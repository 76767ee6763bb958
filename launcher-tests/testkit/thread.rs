//! Threads that sleep in the kernel: a test uses this to detect that a call is blocked.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use crate::TEST_TIMEOUT;

/// A thread of this process, as seen by other threads.
#[derive(Debug)]
pub struct Thread {
    /// `/proc/self/task/ID/stat`, kept open because a test may read it when it has no free descriptor.
    stat: File,
}

impl Thread {
    /// Returns the calling thread.
    #[must_use]
    pub fn current() -> Self {
        Self { stat: File::open("/proc/thread-self/stat").unwrap() }
    }

    /// Returns the threads of this process with this name; the kernel keeps 15 bytes of a name.
    #[must_use]
    pub fn named(name: &str) -> Vec<Self> {
        let kept = &name[..name.len().min(15)];
        let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|entry| entry.path());
        // A thread that ends in the meantime has no name.
        let has_name =
            |task: &PathBuf| fs::read_to_string(task.join("comm")).is_ok_and(|text| text.trim_end() == kept);
        tasks.filter(has_name).map(|task| Self { stat: File::open(task.join("stat")).unwrap() }).collect()
    }

    /// Waits until the thread sleeps in the kernel. Panics if it ends, or still runs after [`TEST_TIMEOUT`].
    pub fn wait_until_asleep(&self) {
        let state = self.wait_until_not_running();
        assert_eq!(state, Some('S'), "the thread has ended, it does not wait");
    }

    /// Waits until the thread sleeps in the kernel or has ended. Panics if it still runs after
    /// [`TEST_TIMEOUT`].
    pub fn wait_until_asleep_or_ended(&self) {
        self.wait_until_not_running();
    }

    /// Returns the first state in which the thread does not run; `None` if it has ended.
    fn wait_until_not_running(&self) -> Option<char> {
        let deadline = Instant::now() + TEST_TIMEOUT;
        loop {
            let state = self.state();
            if matches!(state, None | Some('S')) {
                return state;
            }
            assert!(Instant::now() < deadline, "still running: {state:?}");
            std::thread::yield_now();
        }
    }

    /// Returns the letter of the thread's state; `None` if it has ended.
    fn state(&self) -> Option<char> {
        let mut stat = [0; 512];
        let length = self.stat.read_at(&mut stat, 0).ok()?;
        // The state follows the name, which may contain any character.
        String::from_utf8_lossy(&stat[..length]).rsplit(") ").next()?.chars().next()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn waiting_thread_counts_as_asleep() {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                tell.send(Thread::current()).unwrap();
                ended.recv().unwrap();
            });
            told.recv().unwrap().wait_until_asleep();
            end.send(()).unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "does not wait")]
    fn finished_thread_does_not_count_as_asleep() {
        std::thread::spawn(Thread::current).join().unwrap().wait_until_asleep();
    }

    #[test]
    fn threads_are_found_by_a_prefix_of_a_long_name() {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let builder = std::thread::Builder::new().name("testkit-found-by-name".into());
        let thread = builder.spawn(move || {
            tell.send(()).unwrap();
            ended.recv().unwrap();
        });
        told.recv().unwrap();
        let found = Thread::named("testkit-found-by-name");
        assert_eq!(found.len(), 1);
        found[0].wait_until_asleep();
        end.send(()).unwrap();
        thread.unwrap().join().unwrap();
    }
}
