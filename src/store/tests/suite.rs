//! Tests of the `Store` trait, run against every implementation.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr)] // in a test a broken expectation ends it

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, thread};

use convoke_store::{FileStore, MemoryStore, PrefixStore, Store, StoreError, StoreServer, TcpStore};
use convoke_testkit::Thread;

/// A store under test, with two handles, as two processes would have them.
struct Backend {
    name: String,
    one: Arc<dyn Store>,
    two: Arc<dyn Store>,
    /// A third handle. Its calls return after the server has read what others sent before.
    other: Arc<dyn Store>,
    has_queues: bool,
    /// The server or folder of the store, which must outlive the handles.
    _alive: Box<dyn fmt::Debug + Send + Sync>,
}

fn backends() -> Vec<Backend> {
    let plain = vec![memory(), tcp(), server_view(), file()];
    let prefixed = vec![memory(), tcp(), server_view(), file()];
    let prefixed = prefixed.into_iter().map(|backend| Backend {
        name: format!("prefix over {}", backend.name),
        one: Arc::new(PrefixStore::new("p", backend.one)),
        two: Arc::new(PrefixStore::new("p", backend.two)),
        ..backend
    });
    plain.into_iter().chain(prefixed).collect()
}

fn memory() -> Backend {
    let store = Arc::new(MemoryStore::new());
    let (one, two, other) = (store.clone(), store.clone(), store);
    Backend { name: "memory".into(), one, two, other, has_queues: true, _alive: Box::new(()) }
}

fn tcp() -> Backend {
    let server = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let connect = || Arc::new(TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap());
    let (one, two, other) = (connect(), connect(), connect());
    Backend { name: "tcp".into(), one, two, other, has_queues: true, _alive: Box::new(server) }
}

/// A handle over TCP and the server's own view.
fn server_view() -> Backend {
    let server = StoreServer::bind(&["127.0.0.1:0".parse().unwrap()]).unwrap();
    let connect = || Arc::new(TcpStore::connect(&server.addresses()[0].to_string(), soon()).unwrap());
    let (one, two, other) = (connect(), server.store(), connect());
    let name = "tcp and its server".into();
    Backend { name, one, two, other, has_queues: true, _alive: Box::new(server) }
}

/// Two handles on one file.
fn file() -> Backend {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let open = || Arc::new(FileStore::open(&path, Some(2), soon()).unwrap());
    let (one, two) = (open(), open());
    let other = two.clone();
    Backend { name: "file".into(), one, two, other, has_queues: false, _alive: Box::new(folder) }
}

/// Returns a deadline in 20 s, for operations that should succeed at once.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Returns a deadline in 60 ms, for operations that should time out.
fn short() -> Instant {
    Instant::now() + Duration::from_millis(60)
}

fn each(test: impl Fn(&Backend)) {
    for backend in backends() {
        println!("backend: {}", backend.name);
        test(&backend);
    }
}

fn each_with_queues(test: impl Fn(&Backend)) {
    each(|backend| {
        if backend.has_queues {
            return test(backend);
        }
        for result in [
            backend.one.queue_push(b"q", b"", soon()).map(drop),
            backend.one.queue_pop(b"q", soon()).map(drop),
            backend.one.try_queue_pop(b"q", soon()).map(drop),
            backend.one.queue_len(b"q", soon()).map(drop),
        ] {
            assert!(matches!(result, Err(StoreError::Unsupported { .. })), "{result:?}");
        }
    });
}

/// Runs `waiter` in a thread, and `then` as soon as that thread waits in the store.
fn while_waiting<R: Send>(backend: &Backend, waiter: impl FnOnce() -> R + Send, then: impl FnOnce()) -> R {
    thread::scope(|scope| {
        let (waiter, thread) = spawn(scope, waiter);
        until_waiting(backend, &thread);
        assert!(!waiter.is_finished(), "it did not wait");
        then();
        waiter.join().unwrap()
    })
}

fn spawn<'a, R: Send + 'a>(
    scope: &'a Scope<'a, '_>,
    work: impl FnOnce() -> R + Send + 'a,
) -> (ScopedJoinHandle<'a, R>, Thread) {
    let (sender, receiver) = channel();
    let handle = scope.spawn(move || {
        sender.send(Thread::current()).unwrap();
        work()
    });
    (handle, receiver.recv().unwrap())
}

/// Returns when the call of `thread` waits in the store.
///
/// The thread sleeps at most twice: for the handshake of a new connection and for its request. The
/// server has read what the thread sent before it answers the third handle.
fn until_waiting(backend: &Backend, thread: &Thread) {
    for _ in 0..3 {
        thread.wait_until_asleep();
        backend.other.num_keys(soon()).unwrap();
    }
}

#[test]
fn value_set_by_one_client_is_read_by_another() {
    each(|backend| {
        for (key, value) in
            [(&b"k"[..], &b"v1"[..]), (b"", b"of the empty key"), (b"empty", b""), (b"\0\xff/\n", b"\0\xff")]
        {
            backend.one.set(key, value, soon()).unwrap();
            assert_eq!(backend.two.get(key, soon()).unwrap(), value);
            assert_eq!(backend.two.try_get(key, soon()).unwrap().as_deref(), Some(value));
        }
        backend.two.set(b"k", b"second", soon()).unwrap();
        assert_eq!(backend.one.get(b"k", soon()).unwrap(), b"second");
        assert_eq!(backend.one.try_get(b"absent", soon()).unwrap(), None);
    });
}

#[test]
fn large_values_survive() {
    each(|backend| {
        let value: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
        backend.one.set(b"large", &value, soon()).unwrap();
        assert!(backend.two.get(b"large", soon()).unwrap() == value);
    });
}

#[test]
fn too_long_keys_and_values_are_refused_without_harm() {
    each(|backend| {
        let (key, value) = (vec![b'k'; 8193], vec![b'v'; (8 << 20) + 1]);
        for result in [backend.one.set(&key, b"", soon()), backend.one.set(b"k", &value, soon())] {
            assert!(matches!(result, Err(StoreError::Invalid { .. })), "{result:?}");
        }
        let many = vec![&b"k"[..]; 131_073];
        assert!(matches!(backend.one.check(&many, soon()), Err(StoreError::Invalid { .. })));
        backend.one.set(b"k", &value[..8 << 20], soon()).unwrap();
        assert_eq!(backend.two.get(b"k", soon()).unwrap().len(), 8 << 20);
    });
}

#[test]
fn get_waits_for_the_key() {
    each(|backend| {
        let got = while_waiting(
            backend,
            || backend.one.get(b"late", soon()),
            || backend.two.set(b"late", b"x", soon()).unwrap(),
        );
        assert_eq!(got.unwrap(), b"x");
    });
}

#[test]
fn wait_ends_however_its_last_key_is_created() {
    each(|backend| {
        backend.two.set(b"here", b"", soon()).unwrap();
        type Appear<'a> = (&'a [u8], Box<dyn Fn() + 'a>);
        let appear: Vec<Appear<'_>> = vec![
            (b"w-set", Box::new(|| backend.two.set(b"w-set", b"", soon()).unwrap())),
            (b"w-add", Box::new(|| assert!(backend.two.add(b"w-add", 1, soon()).is_ok()))),
            (b"w-append", Box::new(|| backend.two.append(b"w-append", b"a", soon()).unwrap())),
            (b"w-multi", Box::new(|| backend.two.multi_set(&[(b"w-multi", b"")], soon()).unwrap())),
            (b"w-cas", Box::new(|| drop(backend.two.compare_set(b"w-cas", b"", b"d", soon()).unwrap()))),
            (b"w-barrier", Box::new(|| backend.two.barrier(b"w-barrier", 1, soon()).unwrap())),
        ];
        for (key, appear) in appear {
            if key == b"w-barrier" && !backend.has_queues {
                continue;
            }
            // A key that is given twice counts once.
            let waited = while_waiting(backend, || backend.one.wait(&[b"here", key, key], soon()), appear);
            waited.unwrap_or_else(|error| panic!("{}: {error}", key.escape_ascii()));
        }
    });
}

#[test]
fn failed_compare_set_ends_no_wait() {
    each(|backend| {
        let late = || backend.two.compare_set(b"w", b"other", b"d", soon()).unwrap();
        thread::scope(|scope| {
            let (waiter, thread) = spawn(scope, || backend.one.wait(&[b"w"], soon()));
            until_waiting(backend, &thread);
            assert_eq!(late(), b"other");
            until_waiting(backend, &thread);
            assert!(!waiter.is_finished(), "a failed compare_set has ended it");
            backend.two.set(b"w", b"", soon()).unwrap();
            waiter.join().unwrap().unwrap();
        });
    });
}

#[test]
fn timeout_names_missing_keys_and_the_store_stays_usable() {
    each(|backend| {
        backend.one.set(b"here", b"", soon()).unwrap();
        for _ in 0..3 {
            let started = Instant::now();
            let error = backend.one.wait(&[b"here", b"gone", b"away"], short()).unwrap_err();
            assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
            match error {
                StoreError::Timeout { operation, keys, .. } => {
                    assert_eq!(operation, "wait");
                    let keys: Vec<_> = keys.iter().map(|key| key.trim_start_matches("p/")).collect();
                    assert_eq!(keys, ["gone", "away"]);
                }
                other => panic!("{other}"),
            }
            assert!(matches!(backend.one.get(b"gone", short()), Err(StoreError::Timeout { .. })));
            assert!(backend.one.check(&[b"here"], soon()).unwrap());
        }
    });
}

#[test]
fn expired_deadline_still_ends_the_call() {
    each(|backend| {
        let past = Instant::now();
        let started = Instant::now();
        assert!(matches!(backend.one.get(b"gone", past), Err(StoreError::Timeout { .. })));
        assert!(matches!(backend.one.barrier(b"b", 2, past), Err(StoreError::Timeout { .. })));
        assert!(started.elapsed() < Duration::from_secs(2));
        backend.one.set(b"k", b"v", soon()).unwrap();
    });
}

#[test]
fn compare_set_follows_torch_rules() {
    each(|backend| {
        let compare_set = |expected: &[u8], desired: &[u8]| {
            let value = backend.one.compare_set(b"c", expected, desired, soon()).unwrap();
            let now = backend.two.try_get(b"c", soon()).unwrap();
            (value, now)
        };
        assert_eq!(compare_set(b"A", b"C"), (b"A".to_vec(), None), "absent and expected: stays absent");
        assert_eq!(compare_set(b"", b"A"), (b"A".to_vec(), Some(b"A".to_vec())), "absent, nothing expected");
        assert_eq!(compare_set(b"B", b"C"), (b"A".to_vec(), Some(b"A".to_vec())), "another value");
        assert_eq!(
            compare_set(b"", b"C"),
            (b"A".to_vec(), Some(b"A".to_vec())),
            "nothing expected, but there"
        );
        assert_eq!(compare_set(b"A", b"C"), (b"C".to_vec(), Some(b"C".to_vec())), "as expected");
    });
}

#[test]
fn add_stores_decimal_text() {
    each(|backend| {
        assert_eq!(backend.one.add(b"n", 5, soon()).unwrap(), 5);
        assert_eq!(backend.two.add(b"n", -7, soon()).unwrap(), -2);
        assert_eq!(backend.one.get(b"n", soon()).unwrap(), b"-2");
        backend.one.set(b"n", b"12abc", soon()).unwrap();
        assert_eq!(backend.two.add(b"n", 1, soon()).unwrap(), 13);
        assert_eq!(backend.one.add(b"zero", 0, soon()).unwrap(), 0);
        assert!(backend.one.check(&[b"zero"], soon()).unwrap());
        assert_eq!(backend.one.add(b"extreme", i64::MIN, soon()).unwrap(), i64::MIN);
        assert_eq!(backend.one.get(b"extreme", soon()).unwrap(), i64::MIN.to_string().as_bytes());
    });
}

#[test]
fn add_to_text_fails_and_the_store_stays_usable() {
    each(|backend| {
        for text in [&b"abc"[..], b"", b"99999999999999999999"] {
            backend.one.set(b"t", text, soon()).unwrap();
            let error = backend.one.add(b"t", 1, soon()).unwrap_err();
            assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
            assert!(error.to_string().ends_with("t is not a number"), "{error}");
            assert_eq!(backend.one.get(b"t", soon()).unwrap(), text);
        }
    });
}

#[test]
fn concurrent_adds_lose_nothing() {
    each(|backend| {
        thread::scope(|scope| {
            for store in [&backend.one, &backend.two, &backend.one, &backend.two] {
                scope.spawn(move || (0..25).for_each(|_| assert!(store.add(b"sum", 1, soon()).is_ok())));
            }
        });
        assert_eq!(backend.one.add(b"sum", 0, soon()).unwrap(), 100);
    });
}

#[test]
fn append_extends_or_creates() {
    each(|backend| {
        backend.one.append(b"a", b"x", soon()).unwrap();
        backend.two.append(b"a", b"yz", soon()).unwrap();
        assert_eq!(backend.one.get(b"a", soon()).unwrap(), b"xyz");
    });
}

#[test]
fn check_requires_all_keys() {
    each(|backend| {
        backend.one.multi_set(&[(b"x", b"1"), (b"y", b"2")], soon()).unwrap();
        assert!(backend.two.check(&[b"x", b"y", b"x"], soon()).unwrap());
        assert!(!backend.two.check(&[b"x", b"z"], soon()).unwrap());
        assert!(backend.two.check(&[], soon()).unwrap());
        backend.two.wait(&[], soon()).unwrap();
    });
}

#[test]
fn multi_set_and_multi_get_accept_many_keys() {
    each(|backend| {
        let keys: Vec<Vec<u8>> = (0..3000).map(|i| format!("key-{i}").into_bytes()).collect();
        let pairs: Vec<(&[u8], &[u8])> = keys.iter().map(|key| (&**key, &key[4..])).collect();
        backend.one.multi_set(&pairs, soon()).unwrap();
        let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        let values = backend.two.multi_get(&keys, soon()).unwrap();
        assert_eq!(values.len(), keys.len());
        assert!(values.iter().zip(&pairs).all(|(value, pair)| value == pair.1));
        assert!(backend.two.multi_get(&[], soon()).unwrap().is_empty());
    });
}

#[test]
fn multi_get_waits_for_all_keys() {
    each(|backend| {
        backend.two.set(b"m1", b"1", soon()).unwrap();
        let got = while_waiting(
            backend,
            || backend.one.multi_get(&[b"m1", b"m2", b"m1"], soon()),
            || backend.two.set(b"m2", b"", soon()).unwrap(),
        );
        assert_eq!(got.unwrap(), [&b"1"[..], b"", b"1"]);
    });
}

#[test]
fn deleted_keys_are_gone_and_count_once() {
    each(|backend| {
        let before = backend.one.num_keys(soon()).unwrap();
        backend.one.multi_set(&[(b"d1", b""), (b"d2", b"")], soon()).unwrap();
        assert_eq!(backend.two.num_keys(soon()).unwrap(), before + 2);
        assert!(backend.two.delete(b"d1", soon()).unwrap());
        assert!(!backend.one.delete(b"d1", soon()).unwrap());
        assert_eq!(backend.one.num_keys(soon()).unwrap(), before + 1);
        assert_eq!(backend.one.try_get(b"d1", soon()).unwrap(), None);
        assert_eq!(backend.two.list_keys(soon()).unwrap(), [b"d2"]);
    });
}

#[test]
fn prefix_filters_key_lists_but_not_the_key_count() {
    each(|backend| {
        let part = PrefixStore::new("a", Arc::new(PrefixStore::new("b", backend.one.clone())));
        part.set(b"k", b"v", soon()).unwrap();
        backend.two.set(b"other", b"", soon()).unwrap();
        assert_eq!(backend.two.get(b"b/a/k", soon()).unwrap(), b"v", "the inner prefix comes first");
        assert_eq!(part.list_keys(soon()).unwrap(), [b"k"]);
        assert_eq!(part.num_keys(soon()).unwrap(), backend.one.num_keys(soon()).unwrap());
        let empty = PrefixStore::new("", backend.one.clone());
        empty.set(b"k", b"of the empty prefix", soon()).unwrap();
        assert_eq!(backend.two.get(b"/k", soon()).unwrap(), b"of the empty prefix");
    });
}

#[test]
fn barrier_opens_when_all_clients_enter_and_only_once() {
    each(|backend| {
        let late = || backend.two.barrier(b"b", 2, soon()).unwrap();
        while_waiting(backend, || backend.one.barrier(b"b", 2, soon()), late).unwrap();
        backend.one.barrier(b"b", 2, short()).expect("a used barrier is open");
        if backend.has_queues {
            assert_eq!(backend.two.get(b"b", soon()).unwrap(), b"3", "the server's own barrier is a number");
        }
        backend.one.barrier(b"none", 0, soon()).unwrap();
    });
}

#[test]
fn timed_out_barrier_participant_still_counts() {
    each(|backend| {
        assert!(matches!(backend.one.barrier(b"b", 2, short()), Err(StoreError::Timeout { .. })));
        backend.two.barrier(b"b", 2, soon()).unwrap();
    });
}

#[test]
fn queues_are_first_in_first_out() {
    each_with_queues(|backend| {
        for item in [&b"1"[..], b"", b"3"] {
            backend.one.queue_push(b"q", item, soon()).unwrap();
        }
        assert_eq!(backend.two.queue_len(b"q", soon()).unwrap(), 3);
        assert!(backend.two.check(&[b"q"], soon()).unwrap());
        assert_eq!(backend.two.try_get(b"q", soon()).ok().flatten().unwrap_or_default(), b"");
        assert_eq!(backend.two.queue_pop(b"q", soon()).unwrap(), b"1");
        assert_eq!(backend.one.try_queue_pop(b"q", soon()).unwrap().as_deref(), Some(&b""[..]));
        assert_eq!(backend.two.queue_pop(b"q", soon()).unwrap(), b"3");
        assert_eq!(backend.one.try_queue_pop(b"q", soon()).unwrap(), None);
        assert_eq!(backend.one.queue_len(b"q", soon()).unwrap(), 0);
        assert!(!backend.two.check(&[b"q"], soon()).unwrap());
        assert!(matches!(backend.one.queue_pop(b"q", short()), Err(StoreError::Timeout { .. })));
    });
}

#[test]
fn each_queue_item_is_delivered_to_one_waiter() {
    each_with_queues(|backend| {
        let mut got = thread::scope(|scope| {
            let stores = [&backend.one, &backend.two, &backend.one, &backend.two, &backend.one, &backend.two];
            let waiters = stores.map(|store| spawn(scope, || store.queue_pop(b"q", soon()).unwrap()));
            waiters.iter().for_each(|(_, thread)| until_waiting(backend, thread));
            for item in 0..6_u8 {
                backend.two.queue_push(b"q", &[item], soon()).unwrap();
            }
            waiters.map(|(waiter, _)| waiter.join().unwrap())
        });
        got.sort();
        assert_eq!(got, [[0], [1], [2], [3], [4], [5]]);
    });
}

#[test]
fn long_wait_of_one_thread_blocks_no_other() {
    each(|backend| {
        thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..8).map(|_| spawn(scope, || backend.one.wait(&[b"end"], soon()).unwrap())).collect();
            waiters.iter().for_each(|(_, thread)| until_waiting(backend, thread));
            let started = Instant::now();
            for i in 0..20_i64 {
                assert_eq!(backend.one.add(b"n", 1, soon()).unwrap(), i + 1);
            }
            assert!(started.elapsed() < Duration::from_secs(5));
            assert!(waiters.iter().all(|(waiter, _)| !waiter.is_finished()));
            backend.one.set(b"end", b"", soon()).unwrap();
        });
    });
}
