//! Points at which a test can make this process kill itself. Empty unless built with `fault-injection`.
//!
//! CONVOKE_FAULT=`who:point:nth:microseconds`: the process `who` (launcher, guard) sends itself SIGKILL that
//! many microseconds after it has come to `point` for the nth time (from 1).

#[cfg(not(feature = "fault-injection"))]
mod points {
    /// Sets which process this is. Does nothing without `fault-injection`.
    pub(crate) fn init(_who: &'static str) {}
    /// A named point at which a test can kill this process. Does nothing without `fault-injection`.
    pub(crate) fn point(_name: &str) {}
}

#[cfg(feature = "fault-injection")]
mod points {
    use std::sync::Mutex;
    use std::time::Duration;

    use nix::sys::signal::{Signal, raise};

    struct FaultPlan {
        point: String,
        left: u32,
        delay: Duration,
    }

    static FAULT_PLAN: Mutex<Option<FaultPlan>> = Mutex::new(None);

    /// Reads CONVOKE_FAULT and keeps the plan if it is for the process `who`.
    pub(crate) fn init(who: &'static str) {
        let text = std::env::var("CONVOKE_FAULT").unwrap_or_default();
        let mut parts = text.split(':');
        let plan = (parts.next() == Some(who)).then(|| {
            Some(FaultPlan {
                point: parts.next()?.to_owned(),
                left: parts.next()?.parse().ok()?,
                delay: Duration::from_micros(parts.next()?.parse().ok()?),
            })
        });
        *FAULT_PLAN.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = plan.flatten();
    }

    /// Kills this process now, or after the planned delay, if the plan names this point and this visit.
    pub(crate) fn point(name: &str) {
        let mut plan = FAULT_PLAN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(armed) = plan.as_mut().filter(|plan| plan.point == name) else { return };
        armed.left = armed.left.saturating_sub(1);
        if armed.left > 0 {
            return;
        }
        let delay = armed.delay;
        *plan = None;
        if delay.is_zero() {
            let _ = raise(Signal::SIGKILL);
        }
        std::thread::spawn(move || {
            std::thread::sleep(delay);
            let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), Signal::SIGKILL);
        });
    }
}

pub(crate) use points::{init, point};
