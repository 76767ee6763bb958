//! Model tests of the state that threads share: loom runs them in all interleavings that a processor allows.
//! `scripts/check` builds the tests with `--cfg loom` and runs the model tests. A model test fails if a
//! thread sleeps for ever or the test does not end.

use std::sync::Arc;
use std::task::Wake;
use std::time::Duration;

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::SeqCst;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::callbacks::CallbackQueue;
use super::completion::Completion;
use super::mux::Doorbell;
use super::progress_lock::{Drive, Goal, Inner};
use super::submission::SubmissionQueue;

const LONG: Duration = Duration::from_secs(3600);

/// A stand-in for the eventfd that wakes the driver.
#[derive(Debug, Default)]
struct FakeDoorbell {
    rung: Mutex<bool>,
    rang: Condvar,
}

impl Doorbell for Arc<FakeDoorbell> {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.rang.notify_all();
    }
}

impl FakeDoorbell {
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.rang.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// A stand-in for the engine, which completes one queued task on each turn of `drive`; `poll_once` only
/// collects tasks.
#[derive(Debug)]
struct Fake {
    submissions: Arc<SubmissionQueue<Arc<Completion>, Arc<FakeDoorbell>>>,
    doorbell: Arc<FakeDoorbell>,
    tasks: Vec<Arc<Completion>>,
    aborted: bool,
}

impl Drive for Fake {
    type Task = Arc<Completion>;
    type Doorbell = Arc<FakeDoorbell>;

    fn drive(&mut self, goal: &Goal<'_>) {
        loop {
            self.collect();
            if let Some(completion) = self.tasks.pop() {
                completion.complete(Ok(None));
            }
            if goal.is_reached() {
                return;
            }
            if self.tasks.is_empty() {
                if self.submissions.prepare_sleep(|| goal.should_release()) {
                    self.doorbell.wait();
                }
                self.submissions.end_sleep();
            }
        }
    }

    fn collect(&mut self) {
        if let Some((tasks, abort)) = self.submissions.collect() {
            self.tasks.extend(tasks);
            self.aborted |= abort.is_some();
        }
    }

    fn poll_once(&mut self) {
        self.collect();
    }

    fn on_panic(&mut self) {}
}

fn inner() -> Inner<Fake> {
    let doorbell = Arc::new(FakeDoorbell::default());
    let submissions = Arc::new(SubmissionQueue::with_doorbell(Arc::clone(&doorbell)));
    Inner::new(
        Fake { submissions: Arc::clone(&submissions), doorbell, tasks: Vec::new(), aborted: false },
        submissions,
    )
}

/// Runs `body` in all interleavings with at most `interruptions` preemptions of a thread that was able to
/// continue.
fn model(interruptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions);
    builder.check(body);
}

#[test]
fn sleeping_progress_thread_misses_no_submission() {
    model(4, || {
        let doorbell = Arc::new(FakeDoorbell::default());
        let submissions = Arc::new(SubmissionQueue::<u32, _>::with_doorbell(Arc::clone(&doorbell)));
        let posts: Vec<_> = (1..3)
            .map(|task| {
                let submissions = Arc::clone(&submissions);
                thread::spawn(move || submissions.post(|entries| entries.tasks.push(task)))
            })
            .collect();
        let mut sum = 0;
        while sum < 3 {
            match submissions.collect() {
                Some((tasks, _)) => sum += tasks.iter().sum::<u32>(),
                None if submissions.prepare_sleep(|| false) => doorbell.wait(),
                None => {}
            }
            submissions.end_sleep();
        }
        posts.into_iter().for_each(|post| post.join().unwrap());
    });
}

#[test]
fn tasks_complete_whichever_thread_drives_progress() {
    model(3, || {
        let inner = Arc::new(inner());
        let call = |inner: &Inner<Fake>| {
            let completion = Arc::new(Completion::new(LONG));
            inner.post(Arc::clone(&completion));
            inner.wait(std::slice::from_ref(&completion), None);
            assert!(completion.take().is_some());
        };
        let other = Arc::clone(&inner);
        let other = thread::spawn(move || call(&other));
        call(&inner);
        other.join().unwrap();
    });
}

#[test]
fn background_thread_completes_operations_without_a_waiter() {
    model(3, || {
        let inner = Arc::new(inner());
        let background = Arc::clone(&inner);
        let background = thread::spawn(move || background.background());
        let calls = Arc::new(AtomicUsize::new(0));
        let (counter, me) = (Arc::clone(&calls), thread::current());
        let completion = Arc::new(Completion::nonblocking(LONG, Arc::clone(inner.callback_queue())));
        let callback = Box::new(move || {
            counter.fetch_add(1, SeqCst);
            me.unpark();
        });
        assert!(completion.on_complete(callback).is_ok());
        inner.post(Arc::clone(&completion));
        inner.poll_once(|| background.thread().unpark());
        while calls.load(SeqCst) == 0 {
            thread::park();
        }
        inner.close(|| background.thread().unpark());
        background.join().unwrap();
        assert_eq!(calls.load(SeqCst), 1);
    });
}

#[test]
fn background_thread_serves_waiting_callers() {
    model(2, || {
        let inner = Arc::new(inner());
        let background = Arc::clone(&inner);
        let background = thread::spawn(move || background.background());
        let loose = Arc::new(Completion::nonblocking(LONG, Arc::clone(inner.callback_queue())));
        inner.post(Arc::clone(&loose));
        inner.poll_once(|| background.thread().unpark());
        let completion = Arc::new(Completion::new(LONG));
        inner.post(Arc::clone(&completion));
        inner.wait(std::slice::from_ref(&completion), None);
        inner.wait(std::slice::from_ref(&loose), None);
        inner.close(|| background.thread().unpark());
        background.join().unwrap();
    });
}

#[test]
fn abort_is_seen_while_progress_changes_threads() {
    model(3, || {
        let inner = Arc::new(inner());
        let other = Arc::clone(&inner);
        let other = thread::spawn(move || other.abort("enough".to_owned()));
        let completion = Arc::new(Completion::new(LONG));
        inner.post(Arc::clone(&completion));
        inner.wait(std::slice::from_ref(&completion), None);
        other.join().unwrap();
        assert!(inner.with_engine(|engine| engine.aborted));
    });
}

#[test]
fn callback_runs_although_the_group_closes_at_once() {
    model(2, || {
        let inner = Arc::new(inner());
        let background = Arc::clone(&inner);
        let background = thread::spawn(move || background.background());
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&calls);
        let completion = Arc::new(Completion::nonblocking(LONG, Arc::clone(inner.callback_queue())));
        assert!(
            completion.on_complete(Box::new(move || drop(counter.fetch_add(1, SeqCst).to_string()))).is_ok()
        );
        inner.post(Arc::clone(&completion));
        inner.poll_once(|| background.thread().unpark());
        while !completion.is_done() {
            thread::yield_now();
        }
        inner.close(|| background.thread().unpark());
        background.join().unwrap();
        assert_eq!(calls.load(SeqCst), 1);
    });
}

#[test]
fn all_waiters_of_an_operation_are_woken() {
    model(3, || {
        let completion = Arc::new(Completion::new(LONG));
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let completion = Arc::clone(&completion);
                thread::spawn(move || {
                    while completion.register_thread() {
                        thread::park();
                    }
                })
            })
            .collect();
        completion.complete(Ok(None));
        waiting.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Counts how often it is dropped or called.
struct Count(Arc<AtomicUsize>);

impl Drop for Count {
    fn drop(&mut self) {
        self.0.fetch_add(1, SeqCst);
    }
}

#[test]
fn resources_of_an_operation_are_dropped_once_after_completion() {
    model(4, || {
        let callback_queue = Arc::new(CallbackQueue::default());
        let completion = Arc::new(Completion::nonblocking(LONG, Arc::clone(&callback_queue)));
        let dropped = Arc::new(AtomicUsize::new(0));
        let (engine, queue, seen) =
            (Arc::clone(&completion), Arc::clone(&callback_queue), Arc::clone(&dropped));
        let engine = thread::spawn(move || {
            assert_eq!(seen.load(SeqCst), 0, "dropped while the engine works on it");
            engine.complete(Ok(None));
            queue.run();
        });
        // This is what happens when the handle of an operation is dropped.
        let memory = Count(Arc::clone(&dropped));
        if completion.is_done() {
            drop(memory);
        } else {
            drop(completion.on_complete(Box::new(move || drop(memory))));
        }
        engine.join().unwrap();
        callback_queue.run();
        assert_eq!((dropped.load(SeqCst), callback_queue.pending_operations()), (1, 0));
    });
}

#[test]
fn completion_callback_and_waker_each_run_once() {
    struct CountingWaker(Arc<AtomicUsize>);
    impl Wake for CountingWaker {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    model(4, || {
        let callback_queue = Arc::new(CallbackQueue::default());
        let completion = Arc::new(Completion::nonblocking(LONG, Arc::clone(&callback_queue)));
        let (called, woken) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (engine, queue) = (Arc::clone(&completion), Arc::clone(&callback_queue));
        let engine = thread::spawn(move || {
            engine.complete(Ok(None));
            queue.run();
        });
        let count = Arc::clone(&called);
        if let Err(callback) =
            completion.on_complete(Box::new(move || drop(count.fetch_add(1, SeqCst).to_string())))
        {
            callback();
        }
        let waits = completion.register_waker(&Arc::new(CountingWaker(Arc::clone(&woken))).into());
        engine.join().unwrap();
        callback_queue.run();
        assert!(completion.take().is_some() && completion.take().is_none());
        assert_eq!((called.load(SeqCst), woken.load(SeqCst)), (1, usize::from(waits)));
    });
}
