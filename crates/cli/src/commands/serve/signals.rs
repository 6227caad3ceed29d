//! Signals: the first interrupt or SIGTERM drains, the second ends at once, SIGHUP reads keys and certificates again.

use tokio::sync::watch;

/// Counts requests to stop. Signals are caught from [`Stops::listen`] on, not from the first poll of a future: a
/// signal that comes while the first request is being answered must already drain.
pub struct Stops(watch::Receiver<u32>);

impl Stops {
    /// A future that ends when the server was asked to stop `times` times.
    pub fn asked(&self, times: u32) -> impl Future<Output = ()> + Send + 'static {
        let mut count = self.0.clone();
        async move {
            if count.wait_for(|count| *count >= times).await.is_err() {
                // Nobody listens for signals any more, so none will come.
                std::future::pending().await
            }
        }
    }

    /// SIGHUP calls `reload`. Where there is nothing to read again it stops the server, as SIGTERM does.
    #[cfg(unix)]
    pub fn listen(reload: Option<Box<dyn Fn() + Send + Sync>>) -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut hangup = signal(SignalKind::hangup())?;
        let (sender, count) = watch::channel(0);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {
                        if let Some(reload) = &reload {
                            reload();
                            continue;
                        }
                    }
                }
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Self(count))
    }

    #[cfg(not(unix))]
    pub fn listen(_: Option<Box<dyn Fn() + Send + Sync>>) -> std::io::Result<Self> {
        let mut interrupt = tokio::signal::windows::ctrl_c()?;
        let (sender, count) = watch::channel(0);
        tokio::spawn(async move {
            while interrupt.recv().await.is_some() {
                sender.send_modify(|count| *count += 1);
            }
        });
        Ok(Self(count))
    }
}
