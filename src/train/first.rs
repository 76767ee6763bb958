//! One rank prepares the data, the others wait for it.

use std::fmt::Display;

use convoke_comm::Group;

use crate::error::TrainError;

/// Calls `prepare` on the first rank of each host, and when it is done there, on the others: what the first has fetched,
/// unpacked or computed lies in the host's files by then, and is not made by all of them at the same time.
///
/// All ranks of the group call it, and wait at most as long as calls on this handle may take.
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
/// [`TrainError::Preparation`] on all ranks if it fails on a first rank, and there on any; the group goes on. If it panics
/// or that rank dies, the others get the error of [`Group::all_gather`], which names it.
///
/// # Cost
/// An all-gather of the outcomes, over all ranks: hosts wait for each other.
///
/// The twin of accelerate's `local_main_process_first`.
pub fn first_on_each_host<T, E: Display>(
    group: &Group,
    prepare: impl FnOnce() -> Result<T, E>,
) -> Result<T, TrainError> {
    first(group, group.place_on_host().0 == 0, prepare)
}

/// As [`first_on_each_host`], but the first rank of the group goes before all others: for files that all hosts share.
///
/// # Errors
/// As there.
///
/// The twin of accelerate's `main_process_first`.
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
    // What came of it, or what is still to be done.
    let prepared = if is_first {
        // The others wait for what this rank has to say: not until its process is gone.
        let awaited = Awaited(group);
        let prepared = prepare();
        std::mem::forget(awaited);
        Ok(prepared)
    } else {
        Err(prepare)
    };
    let reason = match &prepared {
        Ok(Err(error)) => Some(error.to_string()),
        Ok(Ok(_)) | Err(_) => None,
    };
    let reasons = group.all_gather_object(&reason)?;
    if let Some((rank, reason)) =
        reasons.into_iter().enumerate().find_map(|(rank, reason)| Some((rank, reason?)))
    {
        return Err(TrainError::Preparation { rank, reason });
    }
    let failed = |error: E| TrainError::Preparation { rank: group.rank(), reason: error.to_string() };
    prepared.unwrap_or_else(|prepare| prepare()).map_err(failed)
}

/// Ends the group if it is dropped: a panic came in between.
struct Awaited<'a>(&'a Group);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.0.abort(&format!("rank {} panicked while it prepared what others wait for", self.0.rank()));
    }
}
