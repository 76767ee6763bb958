//! Model tests of the state that threads share, over all interleavings that a processor allows.
//! `scripts/check` builds the tests with `--cfg loom` and runs these. A thread that sleeps for ever fails the
//! model, and so does a model that does not end.

use std::sync::Arc;
use std::task::Wake;
use std::time::Duration;

use loom::sync::atomic::AtomicUsize;
use loom::sync::atomic::Ordering::SeqCst;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::chores::Chores;
use super::mailbox::{Bell, Mailbox};
use super::seat::{Core, Drive, Goal};
use super::ticket::Ticket;

const LONG: Duration = Duration::from_secs(3600);

/// A stand-in for the eventfd that wakes the driver.
#[derive(Debug, Default)]
struct Gong {
    rung: Mutex<bool>,
    heard: Condvar,
}

impl Bell for Arc<Gong> {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.heard.notify_all();
    }
}

impl Gong {
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.heard.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// An engine that completes one queued task on each turn of `drive`; `nudge` only collects.
#[derive(Debug)]
struct Fake {
    mailbox: Arc<Mailbox<Arc<Ticket>, Arc<Gong>>>,
    gong: Arc<Gong>,
    tasks: Vec<Arc<Ticket>>,
    aborted: bool,
}

impl Drive for Fake {
    type Task = Arc<Ticket>;
    type Bell = Arc<Gong>;

    fn drive(&mut self, goal: &Goal<'_>) {
        loop {
            self.collect();
            if let Some(ticket) = self.tasks.pop() {
                ticket.complete(Ok(None));
            }
            if goal.is_reached() {
                return;
            }
            if self.tasks.is_empty() {
                if self.mailbox.fall_asleep(|| goal.is_unwanted()) {
                    self.gong.wait();
                }
                self.mailbox.wake();
            }
        }
    }

    fn collect(&mut self) {
        if let Some((tasks, abort)) = self.mailbox.collect() {
            self.tasks.extend(tasks);
            self.aborted |= abort.is_some();
        }
    }

    fn nudge(&mut self) {
        self.collect();
    }

    fn forget_everything(&mut self) {}
}

fn core() -> Core<Fake> {
    let gong = Arc::new(Gong::default());
    let mailbox = Arc::new(Mailbox::with_bell(Arc::clone(&gong)));
    Core::new(Fake { mailbox: Arc::clone(&mailbox), gong, tasks: Vec::new(), aborted: false }, mailbox)
}

/// Runs `body` in all interleavings with at most `interruptions` preemptions of a thread that could have gone
/// on.
fn model(interruptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(interruptions);
    builder.check(body);
}

#[test]
fn sleeping_progress_thread_misses_no_submission() {
    model(4, || {
        let gong = Arc::new(Gong::default());
        let mailbox = Arc::new(Mailbox::<u32, _>::with_bell(Arc::clone(&gong)));
        let posts: Vec<_> = (1..3)
            .map(|letter| {
                let mailbox = Arc::clone(&mailbox);
                thread::spawn(move || mailbox.post(|letters| letters.tasks.push(letter)))
            })
            .collect();
        let mut sum = 0;
        while sum < 3 {
            match mailbox.collect() {
                Some((letters, _)) => sum += letters.iter().sum::<u32>(),
                None if mailbox.fall_asleep(|| false) => gong.wait(),
                None => {}
            }
            mailbox.wake();
        }
        posts.into_iter().for_each(|post| post.join().unwrap());
    });
}

#[test]
fn tasks_complete_whichever_thread_drives_progress() {
    model(3, || {
        let core = Arc::new(core());
        let call = |core: &Core<Fake>| {
            let ticket = Arc::new(Ticket::new(LONG));
            core.post(Arc::clone(&ticket));
            core.wait(std::slice::from_ref(&ticket), None);
            assert!(ticket.take().is_some());
        };
        let other = Arc::clone(&core);
        let other = thread::spawn(move || call(&other));
        call(&core);
        other.join().unwrap();
    });
}

#[test]
fn background_thread_completes_operations_without_a_waiter() {
    model(3, || {
        let core = Arc::new(core());
        let background = Arc::clone(&core);
        let background = thread::spawn(move || background.background());
        let told = Arc::new(AtomicUsize::new(0));
        let (tell, me) = (Arc::clone(&told), thread::current());
        let ticket = Arc::new(Ticket::nonblocking(LONG, Arc::clone(core.chores())));
        let callback = Box::new(move || {
            tell.fetch_add(1, SeqCst);
            me.unpark();
        });
        assert!(ticket.call(callback).is_ok());
        core.post(Arc::clone(&ticket));
        core.nudge(|| background.thread().unpark());
        while told.load(SeqCst) == 0 {
            thread::park();
        }
        core.close(|| background.thread().unpark());
        background.join().unwrap();
        assert_eq!(told.load(SeqCst), 1);
    });
}

#[test]
fn background_thread_serves_waiting_callers() {
    model(2, || {
        let core = Arc::new(core());
        let background = Arc::clone(&core);
        let background = thread::spawn(move || background.background());
        let loose = Arc::new(Ticket::nonblocking(LONG, Arc::clone(core.chores())));
        core.post(Arc::clone(&loose));
        core.nudge(|| background.thread().unpark());
        let ticket = Arc::new(Ticket::new(LONG));
        core.post(Arc::clone(&ticket));
        core.wait(std::slice::from_ref(&ticket), None);
        core.wait(std::slice::from_ref(&loose), None);
        core.close(|| background.thread().unpark());
        background.join().unwrap();
    });
}

#[test]
fn abort_is_seen_while_progress_changes_threads() {
    model(3, || {
        let core = Arc::new(core());
        let other = Arc::clone(&core);
        let other = thread::spawn(move || other.abort("enough".to_owned()));
        let ticket = Arc::new(Ticket::new(LONG));
        core.post(Arc::clone(&ticket));
        core.wait(std::slice::from_ref(&ticket), None);
        other.join().unwrap();
        assert!(core.with_engine(|engine| engine.aborted));
    });
}

#[test]
fn callback_runs_although_the_group_closes_at_once() {
    model(2, || {
        let core = Arc::new(core());
        let background = Arc::clone(&core);
        let background = thread::spawn(move || background.background());
        let told = Arc::new(AtomicUsize::new(0));
        let tell = Arc::clone(&told);
        let ticket = Arc::new(Ticket::nonblocking(LONG, Arc::clone(core.chores())));
        assert!(ticket.call(Box::new(move || drop(tell.fetch_add(1, SeqCst).to_string()))).is_ok());
        core.post(Arc::clone(&ticket));
        core.nudge(|| background.thread().unpark());
        while !ticket.is_done() {
            thread::yield_now();
        }
        core.close(|| background.thread().unpark());
        background.join().unwrap();
        assert_eq!(told.load(SeqCst), 1);
    });
}

#[test]
fn all_waiters_of_an_operation_are_woken() {
    model(3, || {
        let ticket = Arc::new(Ticket::new(LONG));
        let waiting: Vec<_> = (0..2)
            .map(|_| {
                let ticket = Arc::clone(&ticket);
                thread::spawn(move || {
                    while ticket.unpark_me() {
                        thread::park();
                    }
                })
            })
            .collect();
        ticket.complete(Ok(None));
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
        let chores = Arc::new(Chores::default());
        let ticket = Arc::new(Ticket::nonblocking(LONG, Arc::clone(&chores)));
        let dropped = Arc::new(AtomicUsize::new(0));
        let (engine, doing, seen) = (Arc::clone(&ticket), Arc::clone(&chores), Arc::clone(&dropped));
        let engine = thread::spawn(move || {
            assert_eq!(seen.load(SeqCst), 0, "dropped while the engine works on it");
            engine.complete(Ok(None));
            doing.run();
        });
        // This models a handle that is dropped.
        let memory = Count(Arc::clone(&dropped));
        if ticket.is_done() {
            drop(memory);
        } else {
            drop(ticket.keep(Box::new(memory)));
        }
        engine.join().unwrap();
        chores.run();
        assert_eq!((dropped.load(SeqCst), chores.pending()), (1, 0));
    });
}

#[test]
fn completion_callback_and_waker_each_run_once() {
    struct Told(Arc<AtomicUsize>);
    impl Wake for Told {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    model(4, || {
        let chores = Arc::new(Chores::default());
        let ticket = Arc::new(Ticket::nonblocking(LONG, Arc::clone(&chores)));
        let (called, woken) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (engine, doing) = (Arc::clone(&ticket), Arc::clone(&chores));
        let engine = thread::spawn(move || {
            engine.complete(Ok(None));
            doing.run();
        });
        let count = Arc::clone(&called);
        if let Err(callback) = ticket.call(Box::new(move || drop(count.fetch_add(1, SeqCst).to_string()))) {
            callback();
        }
        let waits = ticket.wake(&Arc::new(Told(Arc::clone(&woken))).into());
        engine.join().unwrap();
        chores.run();
        assert!(ticket.take().is_some() && ticket.take().is_none());
        assert_eq!((called.load(SeqCst), woken.load(SeqCst)), (1, usize::from(waits)));
    });
}
