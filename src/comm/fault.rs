//! Moments at which a test can make this process fail. Empty unless built with `fault-points`.

#[cfg(not(feature = "fault-points"))]
mod moments {
    /// A moment that has a name.
    #[inline(always)]
    pub(crate) fn moment(_point: &'static str, _seq: u64, _bytes: usize) {}
}

#[cfg(feature = "fault-points")]
mod moments {
    use std::sync::OnceLock;

    /// Where the runtime of this process is.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Moment {
        /// What it does: `recorded`, `meeting`, `greeted`, `welcomed`, `proving`, `connected` while a group forms;
        /// `calling`, `sent`, `received`, `moved` in a collective; `message sent`, `message received`; `failing`,
        /// `told`; `leaving`, `left`.
        pub point: &'static str,
        /// Number of the collective or message.
        pub seq: u64,
        /// Bytes of it that have moved so far, to or from one peer.
        pub bytes: usize,
    }

    static ACT: OnceLock<fn(Moment)> = OnceLock::new();

    /// From now on `act` is called at each moment, by the thread that has come there. The first call counts.
    pub fn on_moment(act: fn(Moment)) {
        let _ = ACT.set(act);
    }

    pub(crate) fn moment(point: &'static str, seq: u64, bytes: usize) {
        if let Some(act) = ACT.get() {
            act(Moment { point, seq, bytes });
        }
    }
}

pub(crate) use moments::moment;
#[cfg(feature = "fault-points")]
pub use moments::{Moment, on_moment};
