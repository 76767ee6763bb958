//! Joining the world of a job.

#![allow(unsafe_code)]

use std::ffi::c_char;
use std::sync::Arc;
use std::time::{Duration, Instant};

use convoke_comm::{CommError, GroupOptions, Session};
use convoke_store::{MemoryStore, PrefixStore, Store, TcpStore};

use crate::group::Group;
use crate::pointers::{check_place, invalid, put, text};
use crate::status::{Status, run};

/// Time limit for forming a group, unless the program gives another.
const DEFAULT_INIT_TIMEOUT: Duration = Duration::from_secs(5 * 60);

/// The way to join a world. Set all bytes to 0, then `size`, then what differs from the defaults.
#[repr(C)]
#[derive(Debug)]
pub struct InitOptions {
    /// `sizeof(cvk_init_options)`.
    pub size: usize,
    /// `tcp://host:port`, `file:///path` or `env://`; `NULL` means the environment variables of a launcher,
    /// `mpirun` or `srun`, and without any of them a world of one rank.
    pub url: *const c_char,
    /// `host:port` of a store server with the protocol of torch's TCPStore, where the ranks meet; `NULL`
    /// means the one of `url`. Needs `rank`, `world_size`, and a `name` that no other group has at that
    /// store.
    pub store: *const c_char,
    /// This rank, if `world_size` is not 0.
    pub rank: usize,
    /// Number of ranks; 0 means that the environment or the URL gives it, and this rank.
    pub world_size: usize,
    /// Name of the world in errors and logs; `NULL` means `world`.
    pub name: *const c_char,
    /// Time limit of a call in milliseconds; 0 means 30 minutes. A call that exceeds it ends the group.
    pub timeout_ms: u64,
    /// Time limit for forming the group in milliseconds; 0 means 5 minutes.
    pub init_timeout_ms: u64,
    /// Time in milliseconds after which a silent host counts as lost; 0 means 10 seconds. It is rounded to
    /// whole seconds. Dead processes are found at once.
    pub peer_timeout_ms: u64,
    /// Not 0: ranks of one host use TCP connections instead of shared memory.
    pub no_shared_memory: u8,
}

/// Joins the job and connects to all its ranks. `options` may be `NULL`. The group of all ranks is written to
/// `world`; free it with `cvk_group_free`.
///
/// # Safety
/// `options` is `NULL` or points to options whose texts end with a byte 0; `world` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cvk_init(options: *const InitOptions, world: *mut *mut Group) -> Status {
    run(|| {
        check_place(world, "world")?;
        // SAFETY: the caller promises it.
        let mut session = unsafe { session(options) }?;
        let group = Box::into_raw(Box::new(Group::of_world(&session.world()?)));
        // SAFETY: the caller promises it.
        unsafe { put(world, group, "world") }?;
        Ok(Status::Ok)
    })
}

/// # Safety
/// As [`cvk_init`].
unsafe fn session(options: *const InitOptions) -> Result<Session, CommError> {
    // SAFETY: the caller promises it.
    let Some(options) = (unsafe { options.as_ref() }) else { return Session::join() };
    if options.size != size_of::<InitOptions>() {
        return Err(invalid(format!(
            "cvk_init_options.size is {}, and this library's is {}: set it to sizeof(cvk_init_options), and \
             compile with the convoke.h of this library",
            options.size,
            size_of::<InitOptions>()
        )));
    }
    // SAFETY: the caller promises it.
    let [url, store, name] =
        unsafe { [text(options.url, "url")?, text(options.store, "store")?, text(options.name, "name")?] };
    let session = match (url, store, options.world_size) {
        (Some(_), Some(_), _) => {
            return Err(invalid("url and store are given: leave one of them out".to_owned()));
        }
        (None, Some(_), 0) => return Err(invalid("store needs rank and world_size".to_owned())),
        (None, Some(address), world_size) => {
            let name = name.ok_or_else(|| invalid("store needs a name".to_owned()))?;
            let timeout = time(options.init_timeout_ms).unwrap_or(DEFAULT_INIT_TIMEOUT);
            let store: Arc<dyn Store> = match world_size {
                1 => Arc::new(MemoryStore::new()),
                _ => Arc::new(TcpStore::connect(address, Instant::now() + timeout)?),
            };
            Session::from_store(Arc::new(PrefixStore::new(name, store)), options.rank, world_size)?
        }
        (None, None, 0) => Session::join()?,
        (Some(url), None, 0) => Session::from_url(url)?,
        (url, None, world_size) => Session::from_url_as(url.unwrap_or("env://"), options.rank, world_size)?,
    };
    Ok(session.with_options(|defaults| with(defaults, options, name)))
}

/// Returns a time that the program gave; `None` for 0, which means the default.
fn time(ms: u64) -> Option<Duration> {
    Some(Duration::from_millis(ms)).filter(|time| !time.is_zero())
}

fn with(mut into: GroupOptions, options: &InitOptions, name: Option<&str>) -> GroupOptions {
    if let Some(name) = name {
        into = into.name(name);
    }
    if let Some(timeout) = time(options.timeout_ms) {
        into = into.timeout(timeout);
    }
    if let Some(timeout) = time(options.init_timeout_ms) {
        into = into.init_timeout(timeout);
    }
    if let Some(timeout) = time(options.peer_timeout_ms) {
        into = into.peer_timeout(timeout);
    }
    if options.no_shared_memory == 0 { into } else { into.shared_memory(false) }
}
