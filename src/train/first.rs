//! One rank prepares data while the other ranks wait for it.

use std::fmt::Display;

use convoke_comm::Group;

use crate::error::TrainError;

/// Calls `prepare` on the first rank of each host, and then on the other ranks.
///
/// The first rank can fetch, unpack or compute data and store it in the host's files. The other ranks find
/// the data there, so that they do not all produce it at the same time.
///
/// All ranks of the group call this function. The ranks wait for each other no longer than the timeout of
/// calls on `group`.
///
/// ```
/// # fn main() -> Result<(), convoke_train::TrainError> {
/// # let (world, folder) = (convoke_comm::init()?, std::env::temp_dir());
/// # let fetch = |path: &std::path::Path| std::fs::write(path, "1,2,3");
/// let path = folder.join(format!("convoke-doc-{}.csv", std::process::id()));
/// let data = convoke_train::first_on_each_host(&world, || {
///     if !path.exists() {
///         fetch(&path)?;
///     }
///     std::fs::read_to_string(&path)
/// })?;
/// assert_eq!(data, "1,2,3");
/// # std::fs::remove_file(path).unwrap();
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`TrainError::Preparation`] on all ranks if `prepare` fails on a first rank. If `prepare` fails on another
/// rank, only that rank gets the error. The group stays usable. If `prepare` panics or a process dies, the
/// other ranks get the error of [`Group::all_gather`], which names the rank.
///
/// # Cost
/// An all-gather of the outcomes over all ranks, so all hosts wait for each other.
///
/// The function corresponds to accelerate's `local_main_process_first`.
pub fn first_on_each_host<T, E: Display>(
    group: &Group,
    prepare: impl FnOnce() -> Result<T, E>,
) -> Result<T, TrainError> {
    first(group, group.local_rank_and_size().0 == 0, prepare)
}

/// Calls `prepare` on the first rank of the group, and then on all other ranks. Use it for files on a file
/// system that all hosts share.
///
/// # Errors
/// Returns the errors of [`first_on_each_host`].
///
/// The function corresponds to accelerate's `main_process_first`.
pub fn first_of_all<T, E: Display>(
    group: &Group,
    prepare: impl FnOnce() -> Result<T, E>,
) -> Result<T, TrainError> {
    first(group, group.rank() == 0, prepare)
}

fn first<T, E: Display>(
    group: &Group,
    is_first: bool,
    prepare: impl FnOnce() -> Result<T, E>,
) -> Result<T, TrainError> {
    // The outcome of `prepare`, or `prepare` itself if this rank calls it later.
    let prepared = if is_first {
        // The other ranks wait for this rank's outcome. A panic must end their wait at once.
        let awaited = AbortOnPanic(group);
        let prepared = prepare();
        std::mem::forget(awaited);
        Ok(prepared)
    } else {
        Err(prepare)
    };
    let reason = prepared.as_ref().ok().and_then(|outcome| outcome.as_ref().err()).map(E::to_string);
    let mut reasons = group.all_gather_object(&reason)?.into_iter().enumerate();
    if let Some((rank, reason)) = reasons.find_map(|(rank, reason)| Some((rank, reason?))) {
        return Err(TrainError::Preparation { rank, reason });
    }
    let failed = |error: E| TrainError::Preparation { rank: group.rank(), reason: error.to_string() };
    prepared.unwrap_or_else(|prepare| prepare()).map_err(failed)
}

/// Aborts the group when dropped, which happens only if `prepare` panics.
struct AbortOnPanic<'a>(&'a Group);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        self.0.abort(&format!("rank {} panicked while it prepared what others wait for", self.0.rank()));
    }
}
